"""The parts that all HTML reports are made of. A page has no script and loads nothing."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files

_POLICY = "default-src 'none';style-src 'unsafe-inline';img-src data:"


def document(title: str, subtitle: str, body: str) -> str:
    """A whole page, with the shared style page.css in it.

    Args:
        title: plain text, for the window and the heading.
        subtitle: plain text, for the line below the heading.
        body: HTML.
    """
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    name = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{name}</title>"
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<style>{style}</style></head><body><main>"
        f"<header><h1>{name}</h1><p>{html.escape(subtitle)}</p></header>{body}</main></body></html>\n"
    )


def tiles(values: Mapping[str, str]) -> str:
    """The most important numbers, large; each value (plain text) above its name."""
    cells = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
        for name, value in values.items()
    )
    return f'<section class="tiles">{cells}</section>'


def facts(values: Mapping[str, str]) -> str:
    """Names and values (plain text) on one line."""
    spans = "".join(
        f"<span>{html.escape(name)} <b>{html.escape(value)}</b></span>"
        for name, value in values.items()
    )
    return f'<p class="facts">{spans}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1) -> str:
    """A table of numbers, the first `num_words` columns of words; `head` is plain text.

    The cells of `rows` are HTML.
    """
    lines = [_row("th", map(html.escape, head), num_words)]
    lines += [_row("td", row, num_words) for row in rows]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _row(tag: str, cells: Iterable[str], num_words: int) -> str:
    words = ' class="words"'
    line = (
        f"<{tag}{words if place < num_words else ''}>{cell}</{tag}>"
        for place, cell in enumerate(cells)
    )
    return f"<tr>{''.join(line)}</tr>"


def swatch(color: str) -> str:
    """A small square in a CSS colour, to stand before a name."""
    return f'<i class="swatch" style="background:{color}"></i>'


def legend(names: Mapping[str, str]) -> str:
    """Names (plain text) behind a swatch of their CSS colour, in a row."""
    spans = (f"<span>{swatch(color)}{html.escape(name)}</span>" for name, color in names.items())
    return f'<p class="legend">{"".join(spans)}</p>'


def in_two_widths(draw: Callable[[bool], str]) -> str:
    """A wide picture, and beside it what a narrow window shows in its place.

    Args:
        draw: returns the picture (SVG) for a wide window if True, for a narrow one if False.
    """
    return f'<div class="wide">{draw(True)}</div><div class="narrow">{draw(False)}</div>'


def panels(pictures: Mapping[str, str], *, columns: int, least_px: int) -> str:
    """Pictures (SVG) under their titles, `columns` in a row; fewer than `least_px` wide wrap."""
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"
        for title, svg in pictures.items()
    )
    return f'<div class="panels" style="--columns:{columns};--least:{least_px}px">{figures}</div>'
