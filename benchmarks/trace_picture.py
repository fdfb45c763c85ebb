"""Draws docs/trace.png: a search of the trained toy that speculates, on its page: `python -m benchmarks.trace_picture`.

Needs playwright, of the extra `test`, and a Chromium.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.common import PAIR
from vllm_trie import Trace, beam_params
from vllm_trie.trace.html_page import trace_page

TARGET = Path(__file__).resolve().parent.parent / "docs" / "trace.png"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
WIDTH, MARGIN = 1200, 20  # pixels, of the picture and below the KV blocks
PROMPT = 'def is_prime(number):\n    """Whether the number is a prime."""\n'


def search() -> Trace:
    """What is drawn."""
    from vllm import LLM

    drafts = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": 2}
    options = {"additional_config": {"trie_beam": {}}, "kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}
    llm = LLM(str(PAIR / "target"), speculative_config=drafts, block_size=32, enforce_eager=True, **options)
    asked = beam_params(6, n=3, min_tokens=36, max_tokens=48, trace=True, speculation="exact", draft_width=8)
    (output,) = llm.generate([PROMPT], asked)
    return Trace.of(output)


def draw(trace: Trace, target: Path) -> None:
    """Write the picture."""
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)))
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 700})
        shown = trace_page(trace, "Six beams").replace(
            "TraceView.show(document", "window.view = TraceView.show(document"
        )
        tab.set_content(shown)
        tab.evaluate("view.select(view.nodes.nodeOfFinished[view.trace.returned[0]], true)")
        tab.wait_for_timeout(500)
        blocks = tab.locator("canvas.blocks").bounding_box()
        assert blocks is not None
        shown_down_to = blocks["y"] + blocks["height"] + MARGIN
        tab.screenshot(path=target, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": shown_down_to})
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docs/trace.png: a search on its page.")
    parser.add_argument("--out", type=Path, default=TARGET)
    draw(search(), parser.parse_args().out)


if __name__ == "__main__":
    main()
