"""The page in a real browser: what it draws, says and takes from the keyboard; without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import headless, new_tab
from tests.support.engine import ROOT
from tests.support.traces import random_trace
from vllm_trie.trace import Trace
from vllm_trie.trace.html_page import trace_page

pytestmark = pytest.mark.slow

TRACE = random_trace(6, 30, num_drafts=10)
DRAWN = "new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))"  # all that is asked for


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with headless() as browser:
        yield browser


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    with new_tab(browser) as tab:
        yield tab


def open_page(tab: Any, folder: Path, trace: Trace) -> None:
    path = folder / "search.html"
    path.write_text(trace_page(trace).replace("TraceView.show(document", "window.view = TraceView.show(document"))
    tab.goto(path.as_uri())
    tab.evaluate(DRAWN)


def num_pixels(tab: Any, name: str) -> int:
    """How many pixels of the trie have nearly a colour of this name."""
    return tab.evaluate(
        """(name) => { const { canvas, colour } = view; let count = 0;
        const wanted = [1, 3, 5].map((at) => parseInt(colour[name].slice(at, at + 2), 16));
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        for (let at = 0; at < data.length; at += 4) {
          count += data[at + 3] > 250 && wanted.every((value, i) => Math.abs(data[at + i] - value) < 12);
        } return count; }""",
        name,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dead_drafted_finished_and_returned_have_their_colours(tab: Any, tmp_path: Path, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    open_page(tab, tmp_path, TRACE)
    named = tab.evaluate("view.colour")
    assert len({named[name] for name in ("paper", "dead", "live", "drafted", "draft", "finished", "selected")}) == 7
    assert min(num_pixels(tab, name) for name in ("dead", "live", "drafted", "draft")) > 20
    tab.focus(".frame")
    tab.keyboard.press("End")
    tab.evaluate(DRAWN)
    assert min(num_pixels(tab, name) for name in ("returned", "selected")) > 20
    assert tab.evaluate("getComputedStyle(document.querySelector('.trie-trace')).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)"
    )


def test_arrow_keys_go_along_the_trie_and_say_where_they_are(tab: Any, tmp_path: Path) -> None:
    open_page(tab, tmp_path, TRACE)
    tab.focus(".frame")

    def said(key: str) -> str:
        tab.keyboard.press(key)
        item = tab.locator(f"#{tab.get_attribute('.frame', 'aria-activedescendant')}")
        return item.get_attribute("aria-label")

    best = TRACE.hypothesis(TRACE.returned[0])
    labels = [said("End")] + [said("ArrowLeft") for _ in best[1:]]
    assert "returned as number 1" in labels[0]
    assert [int(label.split(" (")[1].split(")")[0]) for label in labels] == best[::-1]
    assert labels[-1].startswith("Step 1, slot")
    assert said("ArrowLeft") == labels[-1]
    assert [said("ArrowRight").split(",")[0] for _ in range(3)] == ["Step 2", "Step 3", "Step 4"]
    assert said("Home").startswith("Step 1, ")
    first, second = said("ArrowDown"), said("ArrowDown")
    assert first != second
    assert said("ArrowUp") == first
    assert tab.get_attribute(".frame", "role") == "tree"


def test_the_slider_shows_the_search_as_it_was_after_a_step(tab: Any, tmp_path: Path) -> None:
    open_page(tab, tmp_path, TRACE)
    tab.fill("input[type=range]", "12")
    tab.evaluate(DRAWN)
    assert tab.inner_text(".summary").startswith("Step 12 of 30: 6 beams, 0 finish here")
    assert "Step 12" in tab.inner_text(".trie-trace .trie-trace, #trace")
    assert tab.get_attribute("input[type=range]", "aria-valuetext").startswith("Step 12 of 30")
    assert "blocks are held" in tab.get_attribute("canvas.blocks", "aria-label")
    assert tab.evaluate("view.seen(0, view.step, -Infinity, Infinity).returned.length") == 0


def test_the_score_is_under_the_pointer(tab: Any, tmp_path: Path) -> None:
    open_page(tab, tmp_path, TRACE)
    x, y = tab.evaluate(
        """(() => { const node = view.nodes.nodeOf[20][3], frame = view.frame; view.reveal(node);
        const { left, top } = frame.getBoundingClientRect();
        return [left + view.x(20) - frame.scrollLeft, top + view.y(node) - frame.scrollTop]; })()"""
    )
    tab.mouse.move(x, y)
    assert f"log-probability {TRACE.scores[20][3]:.4f}" in tab.inner_text(".tip")


def test_the_text_alternative_has_every_finished_hypothesis(tab: Any, tmp_path: Path) -> None:
    open_page(tab, tmp_path, TRACE)
    shown = tab.evaluate("[...document.querySelectorAll('td.text')].map((cell) => cell.textContent)")
    assert sorted(shown) == sorted(TRACE.text(TRACE.hypothesis(n)) for n in range(len(TRACE.finished.steps)))
    assert shown[:3] == [TRACE.text(TRACE.hypothesis(number)) for number in TRACE.returned]


def test_all_that_is_returned_is_listed_and_of_the_others_it_says_how_many_are_not(tab: Any, tmp_path: Path) -> None:
    trace = random_trace(250, 2)
    assert len(trace.finished.steps) == 250
    open_page(tab, tmp_path, replace(trace, returned=[*range(230)]))
    assert tab.locator("tbody tr").count() == 250
    open_page(tab, tmp_path, replace(trace, returned=[0, 1, 2]))
    assert tab.locator("tbody tr").count() == 203
    assert tab.inner_text(".list p") == "and 47 more, which were not returned"


def test_a_view_that_is_replaced_lets_go_of_the_page(tab: Any, tmp_path: Path) -> None:
    open_page(tab, tmp_path, TRACE)
    tab.evaluate(
        """const add = MediaQueryList.prototype.addEventListener;
        MediaQueryList.prototype.addEventListener = function (...given) { queries.push(this); add.apply(this, given); };
        window.queries = [];"""
    )
    show = "window.view = TraceView.show(document.getElementById('trace'), view.trace)"
    tab.evaluate(f"{show}; view.play(); window.old = view; {show}; view.play(); window.count = [0, 0]")
    tab.evaluate("old.refresh = () => count[0]++; view.refresh = () => count[1]++; 0")
    tab.evaluate("for (const query of queries) query.dispatchEvent(new Event('change'))")
    assert tab.evaluate("[old.timer, view.timer > 0, count[0], count[1] > 0]") == [0, True, 0, True]


def test_of_128_beams_only_what_is_seen_is_drawn(tab: Any, tmp_path: Path) -> None:
    open_page(tab, tmp_path, random_trace(128, 256))
    drawn = []
    for zoom in range(7):
        tab.evaluate(f"view.zoomTo({zoom}); view.draw()")
        drawn.append(tab.evaluate("view.numDrawn"))
    assert max(drawn) < 128 * 256 / 4
    assert drawn[-1] < 1000


def test_texts_of_tokens_are_text(tab: Any, tmp_path: Path) -> None:
    evil = random_trace(2, 4)
    evil.texts.update(dict.fromkeys(evil.texts, "</script><img src=x onerror=alert(1)>{title}"))
    open_page(tab, tmp_path, evil)
    assert tab.locator("img").count() == 0
    assert "</script><img" in tab.inner_text("tbody")


def test_the_command_writes_the_page_of_an_answer(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text(json.dumps({"object": "text_completion", "trace": TRACE.as_dict()}))
    command = [sys.executable, "-m", "vllm_trie.trace", "answer.json", "search.html", "--title", "A & B"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    written = (tmp_path / "search.html").read_text()
    assert "<title>A &amp; B</title>" in written
    assert "http:" not in written.replace("http-equiv", "")
    (tmp_path / "answer.json").write_text('{"choices": []}')
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has no trace; ask for one with trace=True" in done.stderr
