"""The playground asks a real server, from a page that lies in a folder, and draws what comes."""

from __future__ import annotations

import pytest

from benchmarks.server import Server
from tests.support.browser import headless, new_tab
from tests.support.engine import ROOT
from tests.support.served import PROMPTS, beams, complete

pytestmark = pytest.mark.slow

PAGE = ROOT / "examples" / "playground" / "index.html"


def test_the_playground_draws_what_the_server_finds_and_shows_why_it_refuses(server: Server) -> None:
    expected = [choice.text for choice in complete(server, n=3, max_tokens=20, **beams(5)).choices]
    with headless() as browser, new_tab(browser, ("file:", "data:", server.url)) as tab:
        tab.goto(PAGE.as_uri())
        fields = {"url": server.url, "beam_width": "5", "max_tokens": "20", "prompt": PROMPTS[0]}
        for name, value in fields.items():
            tab.fill(f"[name={name}]", value)
        tab.click("form button")
        tab.wait_for_selector(".trie-trace canvas")
        texts = [tab.text_content(f"tbody tr:nth-child({row}) td.text") for row in (1, 2, 3)]
        assert [text.removesuffix("</s>") for text in texts] == expected
        assert tab.evaluate("view.numDrawn") > 20
        refused = browser.new_page()  # where the browser itself says that there was an error
        refused.goto(PAGE.as_uri())
        refused.fill("[name=url]", server.url)
        refused.fill("[name=beam_width]", "1000")
        refused.click("form button")
        refused.wait_for_selector("#problem:not(:empty)")
        assert "beam_width=1000 exceeds max_num_seqs=64" in refused.inner_text("#problem")
