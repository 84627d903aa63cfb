"""The head of an HTML page that has no script and loads nothing: a report of either tower."""

from __future__ import annotations

import html
from importlib.resources import files

_POLICY = "default-src 'none';style-src 'unsafe-inline';img-src data:"


def page_head(title: str, style: str) -> str:
    """The page up to its body; `style` (CSS) follows what all pages share, page.css."""
    shared = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{shared}{style}</style></head>"
    )
