"""The page in a real browser: what it shows, follows and refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.http_service import Api, listening
from tests.helpers.launch import HANG_S
from tests.helpers.live_service import folder_in_memory
from tests.helpers.shown_service import MARKUP, ShownService, shown_service

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


ADMIN = ("submit", "read", "admin")
PICTURES = os.environ.get("TLORA_PICTURES")
"""A folder for pictures of the page, as docs/images has them."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


class Site:
    """A busy service on a port."""

    def __init__(self, shown: ShownService, api: Api, address: str) -> None:
        self.shown, self.api, self.address = shown, api, address

    def of(self, tenant: str = "ann", scopes: tuple[str, ...] = ("submit", "read")) -> str:
        """The page's address for a tenant."""
        return f"{self.address}/#token={self.api.token(tenant, scopes)}"


@pytest.fixture(scope="module")
def site(browser: Browser) -> Iterator[Site]:
    """Starts after the browser: where there is none, it is not needed."""
    with (
        folder_in_memory() as folder,
        shown_service(folder / "service") as (shown, api),
        listening(api.app) as address,
    ):
        yield Site(shown, api, address)


def wait_for(page: Page, selector: str) -> None:
    page.locator(selector).first.wait_for()


def cut(page: Page) -> list[str]:
    """What is wider than the window, or than the element that holds it."""
    wide = "e.scrollWidth > Math.min(innerWidth, e.clientWidth || innerWidth) + 1"
    return list(
        page.evaluate(
            f"[...document.querySelectorAll('html, body *')].filter(e => {wide})"
            ".map(e => e.tagName + '#' + e.id)"
        )
    )


def picture(page: Page, name: str, height: int) -> None:
    """Keeps a picture, where one is wanted."""
    if PICTURES:
        page.wait_for_timeout(1500)
        width = page.viewport_size["width"]  # type: ignore[index]
        clip = {"x": 0, "y": 0, "width": width, "height": height}
        page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True, clip=clip)


def test_an_admin_sees_queue_groups_machines_and_reasons(browser: Browser, site: Site) -> None:
    with opened(browser, site.of("ann", ADMIN)) as page:
        wait_for(page, ".member")
        assert page.url == f"{site.address}/", "the token has left the address"
        for name in ("summaries", "wide-batch", "night-shift"):
            assert page.locator("#jobs").get_by_text(name, exact=True).is_visible()
        beside = page.locator(".group", has_text="contracts-de")
        assert "slowdown" in beside.inner_text()
        assert beside.get_by_role("meter").first.get_attribute("aria-valuemax") == "2"
        assert page.locator(".gpu.held").count() >= 3
        assert page.locator(".gpu.aside").count() == 1
        assert page.locator("#timeline rect").count() >= 4
        reasons = page.locator("#decisions").inner_text()
        assert "1 job starts on 1 GPU: alone" in reasons
        assert "times as much as in turn" in reasons
        waits = page.locator("#jobs tr", has_text="wider-batch").inner_text()
        assert "it asks for 4 GPUs, and 3 can be used now" in waits
        assert page.locator("#jobs th").last.inner_text() == "duration"
        assert cut(page) == []
        picture(page, "service_page", 1290)


def test_markup_in_a_name_is_text(browser: Browser, site: Site) -> None:
    with opened(browser, site.of()) as page:
        wait_for(page, ".member")
        assert page.get_by_text(MARKUP, exact=True).first.is_visible()
        assert page.locator("script").count() == 1


def test_a_loss_curve_grows_and_is_large_on_a_click(browser: Browser, site: Site) -> None:
    with opened(browser, site.of()) as page:
        figure = page.locator(f'#losses [data-job="{site.shown.ids["support-tone"]}"]')
        figure.locator("path.curve").wait_for()
        before = figure.locator("svg").get_attribute("aria-label")
        site.shown.live.run(2.0)
        site.shown.learn()
        page.wait_for_function(
            "([job, before]) => document.querySelector(`#losses [data-job='${job}'] svg`)"
            ".getAttribute('aria-label') !== before",
            arg=[site.shown.ids["support-tone"], before],
        )
        figure.locator("svg").click()
        large = page.locator("#job svg")
        large.locator("path.validation").wait_for()
        assert "validation loss" in str(large.get_attribute("aria-label"))
        assert large.bounding_box()["width"] > 3 * figure.bounding_box()["width"]  # type: ignore[index]


def test_the_queue_is_filtered_and_a_job_opened_by_keyboard(browser: Browser, site: Site) -> None:
    with opened(browser, site.of("ann", ADMIN)) as page:
        wait_for(page, "#jobs tbody tr")
        rows = page.locator("#jobs tbody tr")
        everything = rows.count()
        page.get_by_label("Filter jobs by name").fill("wide")
        assert 0 < rows.count() < everything
        page.get_by_label("Filter jobs by name").fill("")
        page.get_by_label("Filter jobs by state").select_option("finished")
        assert all("finished" in text for text in rows.all_inner_texts())
        page.get_by_role("button", name="poems").focus()
        page.keyboard.press("Enter")
        assert page.get_by_role("dialog").inner_text().startswith("poems")
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="hidden")


def test_nothing_is_cut_on_a_phone_in_the_dark(browser: Browser, site: Site) -> None:
    narrow = {"viewport": {"width": 375, "height": 800}, "color_scheme": "dark"}
    with opened(browser, site.of("ann", ADMIN), **narrow) as page:
        wait_for(page, ".member")
        wait_for(page, "#losses .validation")
        assert cut(page) == []
        page.get_by_role("button", name="wide-batch").click()
        page.get_by_role("dialog").wait_for()
        assert cut(page) == []
        page.keyboard.press("Escape")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == "rgb(18, 22, 28)"
        picture(page, "service_page_narrow", 1290)


def test_a_revoked_token_is_told_in_a_sentence(browser: Browser, site: Site) -> None:
    made = site.api.store.tokens.make("ann", ("read",))
    with opened(browser, f"{site.address}/#token={made.secret}", refused=1) as page:
        wait_for(page, ".member")
        site.api.store.tokens.revoke(made.token.id)
        page.get_by_role("alert").get_by_text("must be one of the service's and not").wait_for()
        assert page.get_by_label("Token").is_visible()
        assert not page.locator("#board").is_visible()
        page.get_by_label("Token").fill(site.api.token("ann"))
        page.keyboard.press("Enter")
        wait_for(page, ".member")
