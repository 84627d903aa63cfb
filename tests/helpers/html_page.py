"""Reads an HTML report and checks what all reports promise."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page: its ids, its references to ids, its text, and that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = re.findall(r"url\(#([^)]*)\)", text)
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        assert not {"src", "onclick"} & values.keys()
        if "id" in values:
            self.ids.append(str(values["id"]))
        for name in ("href", "xlink:href"):
            target = str(values.get(name, "data:image/png"))
            if not target.startswith("data:image/png"):
                assert target.startswith("#"), values
                self.references.append(target[1:])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check_loads_nothing(text: str, page: Page) -> None:
    """Asserts that a page is self-contained and that its ids are unique."""
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    without_names = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    assert "http://" not in without_names
    assert "https://" not in without_names
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
