"""The parts of an HTML report: escaping, tables, and drawings."""

from __future__ import annotations

import pytest

from tests.helpers.html_page import Page, check_loads_nothing
from tlora_megatron.page import (
    GRID,
    JOB,
    NUM_COLORS,
    compact,
    css_color,
    document,
    draw,
    facts,
    legend,
    paint_color,
    panels,
    table,
    tiles,
)

EVIL = "<script>&\"'"


def test_plain_text_is_escaped_in_every_part() -> None:
    texts = {EVIL: EVIL}
    parts = [tiles(texts), facts(texts), table([EVIL], []), legend({EVIL: "var(--c0)"})]
    parts.append(panels({EVIL: "<svg></svg>"}, columns=2, least_px=100))
    text = document(EVIL, EVIL, "".join(parts))
    page = Page(text)
    check_loads_nothing(text, page)
    assert "".join(page.words).count(EVIL) == 3 + 2 + 2 + 1 + 1 + 1


def test_columns_of_words_are_marked() -> None:
    text = table(["job", "state", "steps"], [["a", "done", "<b>3</b>"]], num_words=2)
    assert text.count('class="words"') == 4
    assert "<td><b>3</b></td>" in text


def test_colours_of_a_drawing_become_variables_of_the_page() -> None:
    pytest.importorskip("matplotlib")
    svg = draw((3, 2), "a", lambda axes: axes.plot([0, 4], [1, 2], color=JOB) and None)
    assert "stroke:var(--job)" in svg
    assert "var(--grid)" in svg
    assert "var(--muted)" in svg
    assert "#0000" not in svg
    assert GRID not in svg


def test_drawings_of_one_page_share_no_ids() -> None:
    pytest.importorskip("matplotlib")

    def picture(salt: str) -> str:
        return draw((3, 2), salt, lambda axes: axes.plot([0, 1], color=paint_color(0)) and None)

    assert picture("a") == picture("a")
    page = Page(picture("a") + picture("b"))
    assert page.ids
    assert len(page.ids) == len(set(page.ids))


def test_ticks_that_a_picture_has_fixed_stay() -> None:
    pytest.importorskip("matplotlib")
    svg = draw((3, 2), "a", lambda axes: axes.set_xticks([0, 1], ["few", "many"]) and None)
    assert {"few", "many"} <= set(Page(svg).words)


def test_colours_repeat() -> None:
    assert css_color(NUM_COLORS + 1) == css_color(1) == "var(--c1)"
    assert paint_color(NUM_COLORS + 1) == paint_color(1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (2e-4, "2e-4"),
        (1.75e-4, "1.75e-4"),
        (-3e-6, "-3e-6"),
        (0.25, "0.25"),
        (1.23456, "1.235"),
        (9999, "9999"),
        (15000, "15k"),
        (1e7, "1e7"),
    ],
)
def test_compact_numbers(value: float, shown: str) -> None:
    assert compact(value) == shown
