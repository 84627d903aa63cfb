"""Goes through the pages, finds the address of each figure and compares it with its row."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.figures.pages import NUMBER, Section, figure_spans, sections
from scripts.figures.rows import rounds_to, selector, table, value_of

ADDRESSES = "docs/figures.yaml"
_NO_ROW = "no row;"


@dataclass(frozen=True)
class Place:
    """A text of a page in which figures stand: a section's sentences, or one cell."""

    page: str
    section: str
    text: str
    cell: str = ""
    """Row and column of a cell."""

    def __str__(self) -> str:
        return " | ".join(part for part in (self.page, self.section, self.cell) if part)


@dataclass(frozen=True)
class Figure:
    """A number as it stands on a page, and what its row says."""

    place: Place
    text: str
    address: str
    value: float | None
    """None: it has no row, and the address says why."""
    rows: tuple[tuple[str, str], ...]
    """The file and commit of each row that it comes from."""


@dataclass
class Report:
    """All figures that have an address, and what is wrong with any."""

    measures: dict[str, list[str]]
    figures: list[Figure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def checked(repo: Path) -> Report:
    """Every figure of the pages that docs/figures.yaml names."""
    written = yaml.safe_load((repo / ADDRESSES).read_text(encoding="utf-8"))
    phrases = [phrase for each in written["without_row"].values() for phrase in each]
    checker = _Checker(repo, written["measures"], phrases)
    for page, addresses in written["pages"].items():
        checker.page(page, addresses)
    return checker.finished()


class _Checker:
    """Collects the figures and problems of one page after the other."""

    def __init__(self, repo: Path, measures: dict[str, list[str]], phrases: list[str]) -> None:
        self.repo = repo
        self.report = Report(measures)
        self.phrases = {phrase: _words(phrase) for phrase in phrases}
        self.used_phrases: set[str] = set()

    def problem(self, place: object, what: str) -> None:
        self.report.problems.append(f"{place}: {what}")

    def page(self, page: str, addresses: dict[str, Any]) -> None:
        found = sections((self.repo / page).read_text(encoding="utf-8"))
        for gone in sorted(set(addresses) - set(found)):
            self.problem(ADDRESSES, f"{page} has no such section: {gone}")
        for heading, section in found.items():
            first = len(self.report.figures)
            self.section(page, section, addresses.get(heading, {}))
            if page.startswith("docs/"):
                self.commits(f"{page} | {heading}", section, self.report.figures[first:])

    def section(self, page: str, section: Section, addresses: dict[str, Any]) -> None:
        where = addresses.get("where", {})
        place = Place(page, section.heading, section.text)
        entries = [e if isinstance(e, dict) else {"says": e} for e in addresses.get("text", [])]
        sentences = [(entry["says"], selector(where, entry)) for entry in entries]
        self.text(place, sentences)
        tables = addresses.get("tables", [])
        if len(tables) > len(section.tables):
            self.problem(place, f"must have {len(tables)} tables, got {len(section.tables)}")
        for number, cells in enumerate(section.tables):
            self.table(place, cells, where, tables[number] if number < len(tables) else {})

    def table(
        self, place: Place, cells: list[list[str]], where: dict[str, Any], table: dict[str, Any]
    ) -> None:
        labels = [row[0] for row in cells[1:]]
        rows = [next(iter(row.items())) for row in table.get("rows", [])]
        if rows and labels != [label for label, _ in rows]:
            self.problem(place, f"rows must be {labels}, got {[label for label, _ in rows]}")
            return
        rows = rows or [(label, {}) for label in labels]
        for (label, row), texts in zip(rows, cells[1:], strict=True):
            own = selector(selector(where, table.get("where", {})), row or {})
            addresses = own.pop("cells", table.get("columns", []))
            for column, text in enumerate(texts[1:]):
                cell = Place(place.page, place.section, text, f"{label} | {cells[0][column + 1]}")
                address = addresses[column] if column < len(addresses) else None
                if address and NUMBER.search(text):
                    says = address if "{" in address else f"{{{address}}}"
                    self.text(cell, [(says, own)])
                else:
                    self.text(cell, [])

    def text(self, place: Place, sentences: Iterable[tuple[str, dict[str, Any]]]) -> None:
        covered = {span for says, where in sentences for span in self.sentence(place, says, where)}
        for phrase, words in self.phrases.items():
            for match in words.finditer(place.text):
                covered.add(match.span())
                self.used_phrases.add(phrase)
        for start, end in figure_spans(place.text, all_numbers=bool(place.cell)):
            if not any(first <= start and end <= last for first, last in covered):
                around = " ".join(place.text[max(0, start - 50) : end + 30].split())
                self.problem(place, f"{place.text[start:end]} has no address, in: {around}")

    def sentence(self, place: Place, says: str, where: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Compares the figures of a sentence, and gives where in the text they stand."""
        parts = re.split(r"\{(.*?)\}", says, flags=re.DOTALL)
        pattern = f"({NUMBER.pattern})".join(_words(part).pattern for part in parts[::2])
        matches = list(re.finditer(pattern, place.text))
        if len(matches) != 1:
            self.problem(place, f"must say once, says {len(matches)} times: {says}")
            return
        own = {key: value for key, value in where.items() if key != "says"}
        for group, address in enumerate(parts[1::2], start=1):
            self.compare(place, matches[0][group], " ".join(address.split()), own)
            yield matches[0].span(group)

    def compare(self, place: Place, text: str, address: str, where: dict[str, Any]) -> None:
        if address.startswith(_NO_ROW):
            self.report.figures.append(Figure(place, text, address, None, ()))
            return
        try:
            value, rows = value_of(self.repo, address, where)
        except (ValueError, TypeError, IndexError, SyntaxError) as error:
            self.problem(place, f"{text} = {address}: {error}")
            return
        self.report.figures.append(Figure(place, text, address, value, rows))
        if not rounds_to(text, value):
            self.problem(place, f"the page says {text}, the row {value:.6g} ({address})")

    def commits(self, place: str, section: Section, figures: list[Figure]) -> None:
        """A section links each file that it uses, and names the commits of its rows behind it."""
        used: dict[str, set[str]] = defaultdict(set)
        for name, commit in (row for figure in figures for row in figure.rows):
            used[name].add(commit)
        for name, commits in used.items():
            order = dict.fromkeys(row.get("commit") for row in table(self.repo, name))
            names = [commit for commit in order if commit and commit in commits]
            said = f", commit{'s' * (len(names) > 1)} {_listed(names)}" if names else ""
            link = rf"\[{name}\.csv\]\([^)]*\){_words(said).pattern}"
            more = r"\w|\+|, commit|,?\s+(?:and\s+)?[0-9a-f]{7}"
            if not re.search(f"{link}(?!{more})", section.text):
                self.problem(place, f"must say [{name}.csv](...){said}")

    def finished(self) -> Report:
        for phrase in sorted(set(self.phrases) - self.used_phrases):
            self.problem(ADDRESSES, f"no page has this phrase: {phrase}")
        for name in sorted({name for figure in self.report.figures for name, _ in figure.rows}):
            if name not in self.report.measures:
                self.problem(ADDRESSES, f"measures must name the folders that {name} measures")
        for name, folders in self.report.measures.items():
            for gone in [folder for folder in folders if not (self.repo / folder).exists()]:
                self.problem(ADDRESSES, f"what {name} measures must exist, got {gone}")
        return self.report


def _words(text: str) -> re.Pattern[str]:
    """Finds a text however its lines are broken."""
    return re.compile(r"\s+".join(re.escape(part) for part in re.split(r"\s+", text)))


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
