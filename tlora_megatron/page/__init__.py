"""The parts that all HTML reports are made of: one page without a script, and pictures in SVG.

Colours are CSS variables and text has the page's font, so that one drawing serves light and dark
mode. matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from io import StringIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Locator


_POLICY = "default-src 'none';style-src 'unsafe-inline';img-src data:"


def document(title: str, subtitle: str, body: str) -> str:
    """A whole page, with the shared style page.css: title and subtitle are text, `body` is HTML."""
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
    """A wide picture, and beside it what a narrow window shows;

    `draw` takes True for the wide one.
    """
    return f'<div class="wide">{draw(True)}</div><div class="narrow">{draw(False)}</div>'


def panels(pictures: Mapping[str, str], *, columns: int, least_px: int) -> str:
    """Pictures (SVG) under their titles, `columns` in a row; fewer than `least_px` wide wrap."""
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"
        for title, svg in pictures.items()
    )
    return f'<div class="panels" style="--columns:{columns};--least:{least_px}px">{figures}</div>'


NUM_COLORS = 8
"""Number of colours for curves: `--c0` to `--c7` in page.css."""

JOB, MUTED, GRID, BAD, CARD, TEXT = (f"#0000a{i}" for i in range(6))
"""Colours to paint with; in the drawing each becomes the CSS variable of its lower-case name."""
_VARIABLES = {"a0": "job", "a1": "muted", "a2": "grid", "a3": "bad", "a4": "card", "a5": "text"}

_SVG = "{http://www.w3.org/2000/svg}"
_ROUNDED = ("d", "x", "y", "width", "height", "transform")
ElementTree.register_namespace("svg", _SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def paint_color(index: int) -> str:
    """The colour to paint the curve of this number with; colours repeat after `NUM_COLORS`."""
    return f"#0000c{index % NUM_COLORS}"


def css_color(index: int) -> str:
    """The same colour as `paint_color`'s, for a style attribute of the page."""
    return f"var(--c{index % NUM_COLORS})"


def compact(value: float) -> str:
    """Formats a number in few characters: 0.0002 as 2e-4, 15000 as 15k."""
    if (value and abs(value) < 0.01) or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.4g}"


def draw(
    size: tuple[float, float],
    salt: str,
    paint: Callable[[Axes], None],
    *,
    labels: bool = False,
    x_title: str = "",
) -> str:
    """Draws one axes as an inline SVG, of width and height in inches.

    Args:
        salt: makes the drawing's ids different from those of other drawings of the page.
        paint: fills the axes; ticks and grid are set afterwards, unless it has fixed the ticks.
        labels: leave room for labels of the axes.
        x_title: names what the horizontal axis counts.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("an HTML report needs matplotlib; pip install matplotlib") from error
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 7.5}):
        figure = Figure(figsize=size)
        left, bottom = 0.55 if labels else 0.4, 0.42 if labels or x_title else 0.24
        left, bottom = left / size[0], bottom / size[1]
        axes = figure.add_axes((left, bottom, 0.98 - left, 0.95 - bottom))
        paint(axes)
        if x_title:
            axes.set_xlabel(x_title)
        _style(axes, size)
        buffer = StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    return _inline(buffer.getvalue())


def _style(axes: Axes, size: tuple[float, float]) -> None:
    """Gives the axes a few round ticks, muted text, no frame, and horizontal grid lines."""
    _set_ticks(axes.xaxis, num=min(10, round(1.6 * size[0])), integer=True)
    _set_ticks(axes.yaxis, num=round(2 * size[1]))
    axes.minorticks_off()
    axes.tick_params(length=0, colors=MUTED)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(MUTED)
    if not axes.images:
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.spines[:].set_visible(False)


def _set_ticks(axis: Axis, num: int, *, integer: bool = False) -> None:
    """Gives an axis about `num` round numbers, unless a picture has fixed its ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

    if isinstance(axis.get_major_locator(), FixedLocator):
        return
    locator: Locator = MaxNLocator(nbins=num, integer=integer, steps=(1, 2, 2.5, 5, 10))
    if axis.get_scale() != "linear":
        # Powers of ten, or 1, 2, 5 if it spans few.
        low, high = axis.get_view_interval()
        locator = LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,), numticks=6)
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))


def _inline(svg: str) -> str:
    """Reduces matplotlib's SVG file to what the page needs, with the page's colours and font."""
    root = ElementTree.fromstring(svg)
    _prune(root)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img"}
    text = ElementTree.tostring(root, encoding="unicode").replace(f' xmlns:svg="{_SVG[1:-1]}"', "")
    text = text.replace("<svg:", "<").replace("</svg:", "</")
    return re.sub(r"#0000([ac]\d)\b", lambda m: f"var(--{_VARIABLES.get(m[1], m[1])})", text)


def _prune(parent: ElementTree.Element) -> None:
    """Drops what paints nothing, groups that only nest, fonts, and digits under 0.1 points."""
    parent.tail = None
    if parent.tag != f"{_SVG}text":
        parent.text = None
    children: list[ElementTree.Element] = []
    for child in parent:
        _prune(child)
        _shorten(child)
        if child.tag == f"{_SVG}g" and not child.attrib:
            children.extend(child)
        elif child.tag not in (f"{_SVG}metadata", f"{_SVG}style"):
            children.append(child)
    parent[:] = [
        child
        for child in children
        if child.get("style") != "fill:none" and (len(child) or child.attrib)
    ]


def _shorten(element: ElementTree.Element) -> None:
    """Shortens the attributes of one element and drops those without effect."""
    attributes = element.attrib
    # Ids of groups are referred to by nothing, but for the names that a picture gave its curves.
    if element.tag == f"{_SVG}g" and not attributes.get("id", "").startswith("job-"):
        attributes.pop("id", None)
    for name in attributes.keys() & _ROUNDED:
        tenths = re.sub(r"(\.\d)\d+", r"\1", attributes[name])
        attributes[name] = re.sub(r"\.0\b| (?=[MLCz])|(?<=[MLCz]) ", "", tenths)
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    if "style" in attributes:
        style = re.sub(r"font-family: [^;]*; |; $", "", attributes["style"])
        attributes["style"] = style.replace(": ", ":").replace("; ", ";")
