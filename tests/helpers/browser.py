"""Debian's Chromium for tests of the page; skipped with the reason where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.launch import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(_NAMES)} is installed")
    with api.sync_playwright() as playwright:
        # Containers have no user namespaces for its sandbox; what it loads is our own page.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, address: str, *, refused: int = 0, **settings: Any) -> Iterator[Page]:
    """A page of an address in a window of its own; the console must stay silent.

    Args:
        browser: of `chromium`.
        address: with its fragment.
        refused: requests that the service will refuse, of which the browser itself tells.
        **settings: of the window, as Playwright takes them.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
    context.set_default_timeout(1e3 * HANG_S)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(address)
        yield page
        told = [text for text in complaints if "status of 401" in text]
        assert (complaints, len(told)) == (told, refused)
    finally:
        context.close()
