"""A headless Chromium, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


@contextmanager
def headless() -> Iterator[Any]:
    """Playwright's browser; skips the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright, of the extra `test`, is not installed")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def new_tab(browser: Any, allowed: tuple[str, ...] = ("file:", "data:")) -> Iterator[Any]:
    """An empty page.

    Args:
        allowed: What the addresses that it asks for may begin with.

    Raises:
        AssertionError: it had errors, or asked for something else.
    """
    tab, wrong = browser.new_page(viewport={"width": 1200, "height": 900}), list[str]()
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    tab.on("request", lambda request: request.url.startswith(allowed) or wrong.append(request.url))
    yield tab
    tab.close()
    assert not wrong
