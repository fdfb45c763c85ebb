// Draws a trace into an element of a page: `TraceView.show(element, answer)`. It needs layout.js and style.css.
"use strict";

const TraceView = (() => {
  const L = TraceLayout;
  const ZOOMS = [[3, 2], [6, 3], [12, 4], [24, 7], [56, 12], [80, 16], [112, 22]]; // pixels per step, and per lane
  const MARGIN = 24;
  const LABELLED_FROM = 12; // pixels per lane
  const MOST_PIXELS = [8192, 4096]; // of a cached picture
  const MOST_OTHERS = 200; // hypotheses in the list that were not returned
  const MOST_SHOWN = 240; // characters of the text up to the selected node
  const FRAME = 120; // milliseconds per step while playing

  const COLOURS = ["text", "muted", "dead", "live", "drafted", "draft", "finished", "returned", "selected", "paper", "shared"];

  class View {
    constructor(element, trace) {
      this.trace = trace;
      this.texts = new Map(trace.texts);
      this.numSteps = L.numSteps(trace);
      this.step = this.numSteps - 1;
      this.selected = L.PROMPT;
      this.build(element);
      this.arrange(true);
      this.zoomToFit();
      this.observe();
      this.refresh();
    }

    // The elements of the page.

    build(element) {
      element.classList.add("trie-trace");
      element.replaceChildren();
      const make = (tag, properties = {}, parent = element) => parent.appendChild(Object.assign(document.createElement(tag), properties));
      this.summary = make("p", { className: "summary" });
      const controls = make("div", { className: "controls" });
      const label = make("label", { textContent: "Step " }, controls);
      this.slider = make("input", { type: "range", min: 1, max: this.numSteps, value: this.numSteps }, label);
      this.counter = make("span", { className: "counter" }, label);
      this.player = make("button", { type: "button", textContent: "Play" }, controls);
      this.closer = make("button", { type: "button", textContent: "Zoom in" }, controls);
      this.wider = make("button", { type: "button", textContent: "Zoom out" }, controls);
      const drafts = make("label", { hidden: !this.trace.forests.length }, controls);
      this.showsDrafts = make("input", { type: "checkbox", checked: true }, drafts);
      drafts.append(" rejected drafts");
      this.legend(make("ul", { className: "legend" }), make);
      this.frame = make("div", { className: "frame", tabIndex: 0 });
      this.frame.setAttribute("role", "tree");
      this.frame.setAttribute("aria-label", "Trie of hypotheses. Arrow keys: left to the token before, right to the "
        + "token after, up and down to the others of this step, Home to the first step, End to the best hypothesis.");
      this.items = make("div", { className: "unseen" }, this.frame);
      this.spacer = make("div", { className: "spacer" }, this.frame);
      this.canvas = make("canvas", {}, this.spacer);
      this.canvas.setAttribute("aria-hidden", "true");
      this.tip = make("div", { className: "tip", hidden: true });
      this.chosen = make("p", { className: "chosen" });
      this.status = make("p", { className: "unseen" });
      this.status.setAttribute("aria-live", "polite");
      make("h2", { textContent: "KV blocks that the beams read" });
      this.blocksText = make("p", {});
      this.blocksCanvas = make("canvas", { className: "blocks" });
      this.blocksCanvas.setAttribute("role", "img");
      make("h2", { textContent: "Finished hypotheses" });
      this.list(make("div", { className: "list" }), make);
    }

    legend(list, make) {
      const signs = { live: "leads on, or to a finished hypothesis", dead: "dead", finished: "finished", returned: "returned" };
      const ofDrafts = { drafted: "drafted, and accepted", draft: "drafted, and rejected" };
      for (const [name, text] of Object.entries(this.trace.forests.length ? { ...signs, ...ofDrafts } : signs)) {
        const item = make("li", {}, list);
        make("span", { className: `sign ${name}` }, item).setAttribute("aria-hidden", "true");
        item.append(text);
      }
    }

    list(box, make) {
      const table = make("table", {}, box);
      const head = make("tr", {}, make("thead", {}, table));
      for (const textContent of ["", "log-probability", "tokens", "text"]) make("th", { textContent, scope: "col" }, head);
      const { steps, scores } = this.trace.finished;
      const others = steps.map((_, number) => number).filter((number) => !this.trace.returned.includes(number));
      others.sort((a, b) => scores[b] - scores[a]);
      const numbers = [...this.trace.returned, ...others.slice(0, MOST_OTHERS)];
      this.rows = make("tbody", {}, table);
      this.numbers = numbers;
      numbers.forEach((number, rank) => {
        const row = make("tr", {}, this.rows), isReturned = rank < this.trace.returned.length;
        const button = make("button", { type: "button" }, make("td", {}, row));
        button.textContent = isReturned ? `${rank + 1}` : "–";
        button.setAttribute("aria-label", isReturned ? `show returned hypothesis ${rank + 1}` : "show hypothesis");
        button.onclick = () => this.select(this.nodes.nodeOfFinished[number], true);
        make("td", { textContent: scores[number].toFixed(4) }, row);
        make("td", { textContent: steps[number] + 1 }, row);
        make("td", { className: "text" }, row);
      });
      const numLeft = steps.length - numbers.length;
      if (numLeft > 0) make("p", { textContent: `and ${numLeft} more, which were not returned` }, box);
    }

    observe() {
      const redraw = () => this.refresh();
      this.frame.onscroll = () => this.later();
      this.slider.oninput = () => this.goTo(Number(this.slider.value) - 1);
      this.player.onclick = () => (this.timer ? this.pause() : this.play());
      this.closer.onclick = () => this.zoomTo(this.zoom + 1);
      this.wider.onclick = () => this.zoomTo(this.zoom - 1);
      this.showsDrafts.onchange = () => this.arrange(this.showsDrafts.checked);
      this.frame.onmousemove = (event) => this.hover(event);
      this.frame.onmouseleave = () => (this.tip.hidden = true);
      this.frame.onclick = (event) => this.select(this.nodeAt(event), false);
      this.frame.onkeydown = (event) => this.press(event);
      this.ending = new AbortController();
      const { signal } = this.ending;
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw, { signal });
      const observer = new ResizeObserver(redraw);
      observer.observe(this.frame);
      signal.addEventListener("abort", () => observer.disconnect());
    }

    /** Releases the page, which shows another view now. */
    close() {
      this.pause();
      cancelAnimationFrame(this.frameRequest);
      this.ending.abort();
    }

    // The state of the view.

    arrange(showsDrafts) {
      const was = this.selected === L.PROMPT ? null : this.named(this.selected);
      this.nodes = L.layout(this.trace, showsDrafts);
      this.selected = was ? this.find(was) : L.PROMPT;
      this.numbers.forEach((number, at) => {
        this.rows.children[at].lastChild.textContent = this.textOf(this.nodes.nodeOfFinished[number]);
      });
      if (this.zoom !== undefined) this.refresh();
    }

    named(node) {
      return [this.nodes.kind[node], this.nodes.step[node], this.nodes.place[node]];
    }

    find([kind, step, place]) {
      if (kind === L.DRAFT) return L.PROMPT;
      return kind === L.BEAM ? this.nodes.nodeOf[step][place] : this.nodes.nodeOfFinished[place];
    }

    zoomToFit() {
      const fits = ([width, lane]) => this.nodes.height * lane <= 480 && this.numSteps * width <= 6000;
      this.zoom = Math.max(0, ZOOMS.findLastIndex(fits));
    }

    zoomTo(zoom) {
      const { scrollLeft, scrollTop, clientWidth, clientHeight } = this.frame, [width, lane] = this.scale;
      const middle = [(scrollLeft + clientWidth / 2) / width, (scrollTop + clientHeight / 2) / lane];
      this.zoom = Math.min(Math.max(zoom, 0), ZOOMS.length - 1);
      this.refresh();
      this.frame.scrollLeft = middle[0] * this.scale[0] - clientWidth / 2;
      this.frame.scrollTop = middle[1] * this.scale[1] - clientHeight / 2;
    }

    get scale() {
      return ZOOMS[this.zoom];
    }

    goTo(step) {
      this.step = Math.min(Math.max(step, 0), this.numSteps - 1);
      const right = this.x(this.step) + MARGIN, { scrollLeft, clientWidth } = this.frame;
      if (right > scrollLeft + clientWidth) this.frame.scrollLeft = right - clientWidth;
      if (this.x(this.step) < scrollLeft) this.frame.scrollLeft = this.x(this.step) - clientWidth / 2;
      this.tell(); // after all code that reads the layout
      this.status.textContent = this.sentence();
    }

    play() {
      this.player.textContent = "Pause";
      if (this.step === this.numSteps - 1) this.goTo(0);
      this.timer = setInterval(() => (this.step < this.numSteps - 1 ? this.goTo(this.step + 1) : this.pause()), FRAME);
    }

    pause() {
      clearInterval(this.timer);
      this.timer = 0;
      this.player.textContent = "Play";
    }

    select(node, moves) {
      if (node === undefined || node < 0) return;
      this.selected = node;
      if (this.nodes.step[node] > this.step) this.goTo(this.nodes.step[node]);
      if (moves) this.reveal(node);
      this.announce(node);
      this.later();
    }

    announce(node) {
      const { step, columns } = this.nodes, item = document.createElement("div");
      item.id = `trace-node-${node}`;
      item.setAttribute("role", "treeitem");
      item.setAttribute("aria-level", step[node] + 1);
      item.setAttribute("aria-posinset", node - columns[step[node]] + 1);
      item.setAttribute("aria-setsize", columns[step[node] + 1] - columns[step[node]]);
      item.setAttribute("aria-selected", "true");
      item.setAttribute("aria-label", this.describe(node));
      this.items.replaceChildren(item);
      this.frame.setAttribute("aria-activedescendant", item.id);
      const text = this.textOf(node);
      this.chosen.textContent = `${this.describe(node)}: ${text.length > MOST_SHOWN ? "…" : ""}${text.slice(-MOST_SHOWN)}`;
    }

    reveal(node) {
      const x = this.x(this.nodes.step[node]), y = this.y(node), frame = this.frame;
      const isSeen = (at, from, size) => at > from + MARGIN && at < from + size - MARGIN;
      if (!isSeen(x, frame.scrollLeft, frame.clientWidth)) frame.scrollLeft = x - frame.clientWidth / 2;
      if (!isSeen(y, frame.scrollTop, frame.clientHeight)) frame.scrollTop = y - frame.clientHeight / 2;
    }

    press(event) {
      const to = this.neighbour(event.key);
      if (to === undefined) return;
      event.preventDefault();
      this.select(to, true);
    }

    /** The node to which a key moves the selection, or undefined. */
    neighbour(key) {
      const { parent, step, columns, nodeOfFinished } = this.nodes, at = this.selected;
      if (key === "End" && this.trace.returned.length) return nodeOfFinished[this.trace.returned[0]];
      if (key === "Home" || (at === L.PROMPT && key.startsWith("Arrow"))) return columns[0];
      if (at === L.PROMPT) return undefined;
      if (key === "ArrowLeft") return parent[at] === L.PROMPT ? at : parent[at];
      if (key === "ArrowUp") return Math.max(at - 1, columns[step[at]]);
      if (key === "ArrowDown") return Math.min(at + 1, columns[step[at] + 1] - 1);
      return key === "ArrowRight" ? this.heir(at) : undefined;
    }

    /** The child that lives longest, where children on the way to returned, then to finished hypotheses come first. */
    heir(node) {
      const { parent, step, columns, lastLive, firstFinished } = this.nodes;
      const worth = (child) => lastLive[child] + (firstFinished[child] < L.NEVER ? this.numSteps : 0);
      let best = node;
      for (let child = columns[step[node] + 1]; child < columns[Math.min(step[node] + 2, this.numSteps)]; child++) {
        if (parent[child] === node && (best === node || worth(child) > worth(best))) best = child;
      }
      return best;
    }

    // In words.

    tokenText(token) {
      return this.texts.has(token) ? this.texts.get(token) : `<${token}>`;
    }

    textOf(node) {
      return L.path(this.nodes, node).map((at) => this.tokenText(this.nodes.token[at])).join("");
    }

    describe(node) {
      const { step, token, score, kind, place, rank, drafted } = this.nodes, state = L.state(this.nodes, node, this.step);
      const states = { running: "leads on", dead: "dead", finished: "finished", draft: "draft, rejected" };
      const what = state === "returned" ? `returned as number ${rank[node] + 1}` : states[state];
      const where = kind[node] === L.BEAM ? `, slot ${place[node]}` : "";
      const isDrafted = kind[node] === L.BEAM && drafted[node] ? (drafted[node] === 2 ? ", drafted and accepted" : ", drafted") : "";
      const value = Number.isNaN(score[node]) ? "" : `, log-probability ${score[node].toFixed(4)}`;
      return `Step ${step[node] + 1}${where}, token ${JSON.stringify(this.tokenText(token[node]))} (${token[node]})${value}, ${what}${isDrafted}`;
    }

    sentence() {
      const { columns, kind } = this.nodes, counts = [0, 0, 0];
      for (let node = columns[this.step]; node < columns[this.step + 1]; node++) counts[kind[node]]++;
      const drafts = counts[L.DRAFT] ? `, ${counts[L.DRAFT]} rejected drafts` : "";
      return `Step ${this.step + 1} of ${this.numSteps}: ${counts[L.BEAM]} beams, ${counts[L.FINISHED]} finish here${drafts}`;
    }

    // On the canvas.

    x(step) {
      return MARGIN + step * this.scale[0];
    }

    y(node) {
      return MARGIN / 2 + (this.nodes.lane[node] + 0.5) * this.scale[1];
    }

    later() {
      if (!this.frameRequest) this.frameRequest = requestAnimationFrame(() => this.draw());
    }

    /** Update after a change of sizes, colours or nodes. */
    refresh() {
      const styles = getComputedStyle(this.frame);
      this.colour = Object.fromEntries(COLOURS.map((name) => [name, styles.getPropertyValue(`--${name}`).trim()]));
      this.spacer.style.width = `${this.width}px`;
      this.spacer.style.height = `${this.height}px`;
      this.pale = undefined;
      this.tell();
    }

    get width() {
      return this.x(this.numSteps) + MARGIN * 2;
    }

    get height() {
      return this.nodes.height * this.scale[1] + MARGIN;
    }

    /** Update after a change of the step or the selection. */
    tell() {
      this.areBlocksDrawn = false;
      this.slider.value = this.step + 1;
      this.slider.setAttribute("aria-valuetext", this.sentence());
      this.counter.textContent = ` ${this.step + 1} of ${this.numSteps}`;
      this.summary.textContent = this.sentence() + ".";
      this.later();
    }

    /** Fits a canvas to its place, and returns its drawing context, in CSS pixels. */
    surface(canvas, width, height) {
      const ratio = window.devicePixelRatio || 1;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.width = `${width}px`;
        canvas.style.height = `${height}px`;
      }
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      return context;
    }

    draw() {
      this.frameRequest = 0;
      const { clientWidth, clientHeight, scrollLeft, scrollTop } = this.frame;
      const context = this.surface(this.canvas, clientWidth, clientHeight);
      context.translate(-scrollLeft, -scrollTop);
      const [width, lane] = this.scale;
      const first = Math.max(0, Math.floor((scrollLeft - MARGIN) / width) - 1);
      const last = Math.min(this.step, Math.ceil((scrollLeft + clientWidth - MARGIN) / width) + 1);
      const seen = this.seen(first, last, scrollTop / lane - 2, (scrollTop + clientHeight) / lane + 1);
      const pale = this.picture();
      if (pale) {
        const shown = this.x(this.step) + width / 2, ratio = pale.width / this.width;
        context.drawImage(pale, 0, 0, shown * ratio, pale.height, 0, 0, shown, this.height);
        seen.dead = [];
        seen.draft = [];
      }
      this.numDrawn = Object.values(seen).reduce((sum, nodes) => sum + nodes.length, 0);
      for (const [state, nodes] of Object.entries(seen)) this.drawEdges(context, nodes, state);
      if (this.selected !== L.PROMPT) this.drawPath(context);
      for (const [state, nodes] of Object.entries(seen)) this.drawNodes(context, nodes, state);
      if (lane >= LABELLED_FROM) this.drawLabels(context, seen);
      if (!this.areBlocksDrawn) this.drawBlocks();
      this.areBlocksDrawn = true;
    }

    /** If nodes are small and many: a cached picture of all of them as dead ones, drawn below the others. */
    picture() {
      const ratio = window.devicePixelRatio || 1;
      if (this.scale[1] > 4 || this.width * ratio > MOST_PIXELS[0] || this.height * ratio > MOST_PIXELS[1]) return null;
      if (this.pale) return this.pale;
      this.pale = document.createElement("canvas");
      const context = this.surface(this.pale, this.width, this.height);
      const all = this.seen(0, this.numSteps - 1, -Infinity, Infinity);
      const beams = [...all.dead, ...all.drafted, ...all.running];
      for (const [state, nodes] of [["draft", all.draft], ["dead", beams]]) {
        this.drawEdges(context, nodes, state);
        this.drawNodes(context, nodes, state);
      }
      return this.pale;
    }

    /** Nodes that may be in view, by state, in the order in which they are drawn. */
    seen(first, last, top, bottom) {
      const { lane, parent, columns, kind, drafted } = this.nodes;
      const found = { draft: [], dead: [], drafted: [], running: [], finished: [], returned: [] };
      for (let step = first; step <= last; step++) {
        for (let node = columns[step]; node < columns[step + 1]; node++) {
          const from = parent[node] === L.PROMPT ? lane[node] : lane[parent[node]];
          if (Math.max(lane[node], from) < top) continue;
          if (Math.min(lane[node], from) > bottom) break;
          const state = L.state(this.nodes, node, this.step);
          const isDrafted = kind[node] === L.BEAM && drafted[node] === 2 && state === "running";
          found[isDrafted ? "drafted" : state].push(node);
        }
      }
      return found;
    }

    colourOf(state) {
      return this.colour[state === "running" ? "live" : state];
    }

    edge(context, node) {
      const { parent, step } = this.nodes, x = this.x(step[node]), y = this.y(node), width = this.scale[0];
      const from = parent[node] === L.PROMPT ? y : this.y(parent[node]);
      context.moveTo(x - width, from);
      if (width > 40) context.bezierCurveTo(x - width / 2, from, x - width / 2, y, x, y);
      else context.lineTo(x, y);
    }

    drawEdges(context, nodes, state) {
      context.beginPath();
      for (const node of nodes) this.edge(context, node);
      context.strokeStyle = this.colourOf(state);
      context.lineWidth = state === "dead" || state === "draft" ? 1 : Math.min(1.5, this.scale[1] / 2);
      context.setLineDash(state === "draft" ? [3, 3] : []);
      context.stroke();
      context.setLineDash([]);
    }

    drawPath(context) {
      context.beginPath();
      for (const node of L.path(this.nodes, this.selected)) this.edge(context, node);
      context.strokeStyle = this.colour.selected;
      context.lineWidth = 3;
      context.stroke();
    }

    /** Beams are squares, accepted drafts diamonds, finished hypotheses circles, open unless they were returned. */
    drawNodes(context, nodes, state) {
      const size = Math.min(this.scale[0] / 3, this.scale[1] / 2.5, 5);
      const ends = state === "finished" || state === "returned", radius = Math.max(ends ? size * 1.3 : size, ends ? 2.5 : 0.75);
      context.beginPath();
      for (const node of nodes) {
        const x = this.x(this.nodes.step[node]), y = this.y(node);
        if (ends) {
          context.moveTo(x + radius, y);
          context.arc(x, y, radius, 0, 2 * Math.PI);
        } else if (state === "drafted" && radius > 2) {
          context.moveTo(x - radius * 1.3, y);
          context.lineTo(x, y - radius * 1.3);
          context.lineTo(x + radius * 1.3, y);
          context.lineTo(x, y + radius * 1.3);
          context.closePath();
        } else context.rect(x - radius, y - radius, 2 * radius, 2 * radius);
      }
      const isOpen = state === "finished" || (state === "draft" && radius > 2);
      context.fillStyle = isOpen ? this.colour.paper : this.colourOf(state);
      context.fill();
      if (!isOpen) return;
      context.strokeStyle = this.colourOf(state);
      context.lineWidth = 1.5;
      context.stroke();
    }

    drawLabels(context, seen) {
      const size = Math.min(13, this.scale[1] - 3), room = this.scale[0] - 14, most = Math.floor(room / (size * 0.55));
      context.font = `${size}px ui-monospace, "DejaVu Sans Mono", monospace`;
      context.textBaseline = "bottom"; // above the edge
      for (const [state, nodes] of Object.entries(seen)) {
        context.fillStyle = state === "dead" || state === "draft" ? this.colour.muted : this.colour.text;
        for (const node of nodes) context.fillText(this.label(node, most), this.x(this.nodes.step[node]) + 7, this.y(node));
      }
    }

    label(node, most) {
      const text = this.tokenText(this.nodes.token[node]).replace(/\n/g, "⏎").replace(/\t/g, "→").replace(/ /g, "·");
      return text.length > most ? `${text.slice(0, Math.max(most - 1, 1))}…` : text;
    }

    drawBlocks() {
      const step = Math.min(this.step, this.trace.tokens.length - 1); // after the last step there are no beams
      const { beams, owners, sharers, numPrompt } = L.blocks(this.trace, this.nodes, Math.max(step, 0));
      const count = beams.length, numColumns = count ? owners[0].length + (numPrompt ? 1 : 0) : 0;
      const lane = Math.max(2, Math.min(14, Math.floor(256 / Math.max(count, 1))));
      const width = Math.max(4, Math.min(48, (this.frame.clientWidth - 2) / Math.max(numColumns, 1)));
      const context = this.surface(this.blocksCanvas, Math.max(1, numColumns * width), Math.max(1, count * lane));
      const gap = lane > 2 ? 1 : 0, rows = numPrompt ? owners.map((own) => [L.PROMPT, ...own]) : owners;
      for (let column = 0; column < numColumns; column++) {
        for (let row = 0, end; row < count; row = end) { // beams that share a block are adjacent
          const owner = rows[row][column], number = owner === L.PROMPT ? count : sharers.get(owner);
          end = row + number;
          const colour = number === count ? this.colour.shared : `hsl(${(owner * 137.5) % 360} 60% 55%)`;
          context.fillStyle = number === 1 ? this.colour.dead : colour;
          context.fillRect(column * width, row * lane, width - 1, number * lane - gap);
        }
      }
      const known = (this.trace.blocks || [])[step], numApart = count * (numPrompt + (count ? owners[0].length : 0));
      const held = known ? known[0] : sharers.size + (count ? numPrompt : 0);
      const all = numPrompt + [...sharers.values()].filter((number) => number === count && count > 1).length;
      const ofPrompt = numPrompt ? `, the first one the ${numPrompt} of the prompt` : "";
      this.blocksText.textContent = count
        ? `Step ${step + 1}. A row is a beam, in the order above; a column is a block of ${this.trace.block_size} tokens${ofPrompt}. `
          + "Where a colour goes over several rows, these beams share one block; pale ones have one reader. "
          + `${held} blocks are held, of which all ${count} beams share ${all}; without sharing they would be ${numApart}.`
        : "No beam went on.";
      this.blocksCanvas.setAttribute("aria-label", this.blocksText.textContent);
    }

    // Under the pointer.

    nodeAt(event) {
      const { left, top } = this.frame.getBoundingClientRect(), [width, lane] = this.scale;
      const x = event.clientX - left + this.frame.scrollLeft, y = event.clientY - top + this.frame.scrollTop;
      const step = Math.floor((x - MARGIN + Math.min(8, width / 2)) / width);
      if (step < 0 || step > this.step) return L.PROMPT;
      let best = L.PROMPT, nearest = Math.max(8, lane);
      for (let node = this.nodes.columns[step]; node < this.nodes.columns[step + 1]; node++) {
        const distance = Math.abs(this.y(node) - y);
        if (distance < nearest) [best, nearest] = [node, distance];
      }
      return best;
    }

    hover(event) {
      const node = this.nodeAt(event);
      this.tip.hidden = node === L.PROMPT;
      if (node === L.PROMPT) return;
      this.tip.textContent = this.describe(node);
      this.tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 340)}px`;
      this.tip.style.top = `${event.clientY + 14}px`;
    }
  }

  const views = new WeakMap(); // by element

  function show(element, answer) {
    const trace = L.read(answer); // first, so that on an error the element keeps its view
    if (views.has(element)) views.get(element).close();
    const view = new View(element, trace);
    views.set(element, view);
    return view;
  }

  return { View, show };
})();
