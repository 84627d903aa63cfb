"""What a page holds: sections with their sentences and tables, and the figures in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NUMBER = re.compile(
    r"(?<![\w.,])(?<!\w[-/])(?:(?<![^\s(])[-+])?"
    r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?(?=x?(?!\w))(?!\.\d|,\d{3})"
)
_UNIT = re.compile(r"[ -]?\s?(?:tokens/s\b|ms\b|s\b|us\b|[GM]i?B\b|%|times\b|points\b|x\b)")
_ALSO = re.compile(r"(?:,| and| to| or|, and| /)\s+")
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_ASIDE = re.compile(r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|\]\([^)]*\)")
"""Code, pictures and the addresses of links, whose numbers are no figures."""
_BOLD = re.compile(r"\*\*[^*]+\*\*")


@dataclass
class Section:
    """What stands below one heading."""

    heading: str
    text: str = ""
    tables: list[list[list[str]]] = field(default_factory=list)
    """Tables of rows of cells; the first row holds the headers."""


def sections(page: str) -> dict[str, Section]:
    """The sections of a page by their headings, which must differ."""
    found: dict[str, Section] = {}
    section = Section("")
    before = ""
    for line in _CODE_BLOCK.sub("", page).splitlines():
        if heading := re.match(r"#+ (.*)", line):
            section = Section(heading[1])
            if section.heading in found:
                raise ValueError(f"headings must differ, got two of {section.heading}")
            found[section.heading] = section
        elif line.startswith("|"):
            if not before.startswith("|"):
                section.tables.append([])
            if not re.fullmatch(r"[|: -]+", line) or "---" not in line:
                cells = line.replace("**", "").strip("|").split("|")
                section.tables[-1].append([cell.strip() for cell in cells])
        else:
            section.text += f"{line}\n"
        before = line
    return found


def figure_spans(text: str, *, all_numbers: bool) -> list[tuple[int, int]]:
    """Where the figures of a text stand: all its numbers, or those that look measured."""
    text = _ASIDE.sub(lambda match: "`" * len(match[0]), text)
    spans = [match.span() for match in NUMBER.finditer(text)]
    return spans if all_numbers else sorted(_measured(text, spans))


def _measured(text: str, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    bold = [match.span() for match in _BOLD.finditer(text)]
    next_start = -1  # of a number before a unit
    for start, end in reversed(spans):
        listed = _ALSO.match(text, end)
        has_unit = bool(_UNIT.match(text, end)) or (listed and listed.end() == next_start)
        if has_unit:
            next_start = start
        is_bold = any(first < start and end < last for first, last in bold)
        if has_unit or is_bold or re.search(r"[,.e]", text[start:end]):
            yield start, end
