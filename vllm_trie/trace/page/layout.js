// Places the nodes of a trace, by pure functions without a page. `vllm_trie.trace.Trace` documents the trace.
"use strict";

const TraceLayout = (() => {
  const BEAM = 0, FINISHED = 1, DRAFT = 2; // kinds of nodes
  const NEVER = 1 << 30;
  const PROMPT = -1; // as a parent: the prompt

  /** The trace in an answer, which is a server's response or only the trace. */
  function read(answer) {
    const own = ((answer.kv_transfer_params || {}).trie_beam || {}).trace;
    const trace = answer.returned ? answer : answer.trace || own;
    if (!trace) throw new Error('This answer has no trace; ask for one with "vllm_xargs": {"trace": 1}.');
    return trace;
  }

  function numSteps(trace) {
    return trace.finished.steps.reduce((most, step) => Math.max(most, step + 1), trace.tokens.length);
  }

  /**
   * All nodes, column by column: one column per step, from top to bottom in an order without crossing edges.
   *
   * Returns arrays by node: `step`, `lane` (its height, in lanes), `parent` (a node, or PROMPT), `token`, `score` (nats,
   * NaN for drafts that were not accepted), `kind`, `slot` (of a beam) or `number` (of a finished hypothesis) in `place`,
   * `drafted` (1: drafted, 2: and accepted), `lastLive` (the last step in which a beam descends from it), `firstFinished`
   * (the first step in which a hypothesis through it finishes), `rank` (of a returned hypothesis, from 0; else -1),
   * `filled` (the last node before it whose token fills a KV block, or PROMPT).
   * Column s is `columns[s]` up to `columns[s + 1]`; `nodeOf[s][slot]` is a beam, `nodeOfFinished[number]` a hypothesis.
   */
  function layout(trace, showsDrafts = true) {
    const count = numSteps(trace);
    const nodes = [], columns = [0], nodeOf = [];
    const nodeOfFinished = new Array(trace.finished.steps.length).fill(PROMPT);
    const endings = Array.from({ length: count }, () => []);
    trace.finished.steps.forEach((step, number) => endings[step].push(number));
    const ranks = new Map(trace.returned.map((number, rank) => [number, rank]));
    const drafts = draftsByStep(trace, count);
    const nodeOfDraft = new Map();
    let height = 1;

    for (let step = 0; step < count; step++) {
      const before = step ? nodeOf[step - 1] : [];
      const parentOf = (slot) => (step && before[slot] !== undefined ? before[slot] : PROMPT);
      const found = [];
      const tokens = trace.tokens[step] || [];
      tokens.forEach((token, slot) => {
        const score = trace.scores[step][slot];
        if (score === null) return;
        const parent = parentOf(trace.parents[step][slot]);
        found.push({ parent, token, score, kind: BEAM, place: slot, drafted: 0, rank: -1 });
      });
      for (const number of endings[step]) {
        const { parents, tokens: last, scores } = trace.finished;
        const rank = ranks.has(number) ? ranks.get(number) : -1;
        const parent = parentOf(parents[number]);
        found.push({ parent, token: last[number], score: scores[number], kind: FINISHED, place: number, drafted: 0, rank });
      }
      const byContinuation = new Map();
      for (const node of found) {
        if (node.kind === BEAM) byContinuation.set(`${node.parent} ${node.token}`, node);
      }
      const matched = [];
      for (const draft of drafts[step]) {
        const parent = draft.parent < 0 ? parentOf(-1 - draft.parent) : nodeOfDraft.get(`${draft.forest} ${draft.parent}`);
        if (parent === undefined) continue;
        const same = byContinuation.get(`${parent} ${draft.token}`);
        if (same) {
          same.drafted = Math.max(same.drafted, 1);
          matched.push([draft, same]);
        } else if (showsDrafts) {
          const node = { parent, token: draft.token, score: NaN, kind: DRAFT, place: -1, drafted: 1, rank: -1 };
          matched.push([draft, node]);
          found.push(node);
        }
      }
      for (const node of found) {
        const accepted = trace.accepted[step] || [];
        if (node.kind === BEAM && accepted[node.place] >= 0) node.drafted = 2;
        node.step = step;
      }
      const from = (node) => (node.parent === PROMPT ? 0 : node.parent);
      found.sort((a, b) => from(a) - from(b) || a.kind - b.kind || b.score - a.score || a.place - b.place);
      found.forEach((node, index) => {
        node.id = nodes.length + index;
      });
      nodeOf.push([]);
      for (const node of found) {
        nodes.push(node);
        if (node.kind === BEAM) nodeOf[step][node.place] = node.id;
        if (node.kind === FINISHED) nodeOfFinished[node.place] = node.id;
      }
      for (const [draft, node] of matched) nodeOfDraft.set(`${draft.forest} ${draft.number}`, node.id);
      columns.push(nodes.length);
      height = Math.max(height, found.length);
    }
    const fills = (step) => (trace.prompt_length + step + 1) % trace.block_size === 0;
    return { ...arrays(nodes, columns, height, fills), columns, nodeOf, nodeOfFinished, height, numSteps: count };
  }

  /** The drafts of all forests, by the step to which they belong. */
  function draftsByStep(trace, count) {
    const bySteps = Array.from({ length: count }, () => []);
    trace.forests.forEach((forest, index) => {
      const depths = [];
      forest.tokens.forEach((token, number) => {
        const parent = forest.parents[number];
        depths.push(parent < 0 ? 0 : depths[parent] + 1);
        const step = forest.step + depths[number];
        if (step < count) bySteps[step].push({ forest: index, number, parent, token });
      });
    });
    return bySteps;
  }

  function arrays(nodes, columns, height, fills) {
    const made = {
      step: Int32Array.from(nodes, (node) => node.step),
      parent: Int32Array.from(nodes, (node) => node.parent),
      token: Int32Array.from(nodes, (node) => node.token),
      score: Float64Array.from(nodes, (node) => node.score),
      kind: Uint8Array.from(nodes, (node) => node.kind),
      place: Int32Array.from(nodes, (node) => node.place),
      drafted: Uint8Array.from(nodes, (node) => node.drafted),
      rank: Int32Array.from(nodes, (node) => node.rank),
      lane: new Float32Array(nodes.length),
      lastLive: new Int32Array(nodes.length).fill(-1),
      firstFinished: new Int32Array(nodes.length).fill(NEVER),
      filled: new Int32Array(nodes.length),
    };
    for (let node = 0; node < nodes.length; node++) {
      const parent = made.parent[node], isFull = parent !== PROMPT && fills(made.step[parent]);
      made.filled[node] = parent === PROMPT || isFull ? parent : made.filled[parent];
    }
    for (let step = 0; step + 1 < columns.length; step++) {
      const wanted = [];
      for (let node = columns[step]; node < columns[step + 1]; node++) {
        wanted.push(made.parent[node] === PROMPT ? (height - 1) / 2 : made.lane[made.parent[node]]);
      }
      made.lane.set(spread(wanted, height), columns[step]);
    }
    for (let node = nodes.length - 1; node >= 0; node--) {
      if (made.kind[node] === BEAM) made.lastLive[node] = Math.max(made.lastLive[node], made.step[node]);
      if (made.kind[node] === FINISHED) made.firstFinished[node] = made.step[node];
      const parent = made.parent[node];
      if (parent === PROMPT || made.kind[node] === DRAFT) continue;
      made.lastLive[parent] = Math.max(made.lastLive[parent], made.lastLive[node]);
      made.firstFinished[parent] = Math.min(made.firstFinished[parent], made.firstFinished[node]);
    }
    return made;
  }

  /**
   * Lanes for ascending wishes: at least 1 apart, within 0 and height - 1, and closest to the wishes by least squares
   * (pool adjacent violators).
   */
  function spread(wanted, height) {
    const sums = [], sizes = [];
    wanted.forEach((wish, index) => {
      let sum = wish - index, size = 1;
      while (sums.length && sums[sums.length - 1] / sizes[sizes.length - 1] > sum / size) {
        sum += sums.pop();
        size += sizes.pop();
      }
      sums.push(sum);
      sizes.push(size);
    });
    const lanes = [], most = height - wanted.length;
    sums.forEach((sum, pool) => {
      for (let i = 0; i < sizes[pool]; i++) lanes.push(Math.min(Math.max(sum / sizes[pool], 0), most) + lanes.length);
    });
    return lanes;
  }

  /** The nodes from the first step to this one. */
  function path(nodes, node) {
    const found = [];
    for (let at = node; at !== PROMPT; at = nodes.parent[at]) found.push(at);
    return found.reverse();
  }

  /**
   * The KV blocks with generated tokens that beams read after `step`.
   *
   * Returns `beams` (nodes, top to bottom); `owners`, by beam and block: the node whose token filled the block, and last
   * the beam itself, as only it reads the block that is being filled; `sharers`, by owner: how many beams read the
   * block; and `numPrompt`, the full blocks of the prompt, which all share.
   */
  function blocks(trace, nodes, step) {
    const beams = [];
    for (let node = nodes.columns[step]; node < nodes.columns[step + 1]; node++) {
      if (nodes.kind[node] === BEAM) beams.push(node);
    }
    const owners = beams.map((beam) => {
      const own = [beam];
      for (let node = nodes.filled[beam]; node !== PROMPT; node = nodes.filled[node]) own.push(node);
      return own.reverse();
    });
    const sharers = new Map();
    for (const owner of owners.flat()) sharers.set(owner, (sharers.get(owner) || 0) + 1);
    return { beams, owners, sharers, numPrompt: Math.floor(trace.prompt_length / trace.block_size) };
  }

  /** The state of a node after `step`: "running", "dead", "finished", "returned" or "draft". */
  function state(nodes, node, step) {
    if (nodes.kind[node] === DRAFT) return "draft";
    if (nodes.kind[node] === FINISHED) return nodes.rank[node] >= 0 ? "returned" : "finished";
    return nodes.lastLive[node] >= step || nodes.firstFinished[node] <= step ? "running" : "dead";
  }

  return { BEAM, FINISHED, DRAFT, PROMPT, NEVER, read, numSteps, layout, spread, path, blocks, state };
})();

