"""Values of addresses: expressions over the columns of rows in a CSV file of results."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDERS = ("scripts/bench/results", "docs/measurements")
_FUNCTIONS = {
    "median": np.median,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "std": np.std,
    "abs": np.abs,
    "round": np.round,
    "geometric_mean": lambda values: np.exp(np.mean(np.log(values))),
    "GiB": 2**30,
}


@cache
def table(repo: Path, name: str) -> list[dict[str, str]]:
    """The rows of a file of results, named without its folder and ending."""
    for folder in FOLDERS:
        path = repo / folder / f"{name}.csv"
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
    raise ValueError(f"csv must name a file in {' or '.join(FOLDERS)}, got {name}")


def selector(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """A selector within another one; it begins anew where it names a file."""
    return dict(inner) if "csv" in inner else {**outer, **inner}


class Rows:
    """The rows of one file whose columns have the wanted values; an attribute is a column."""

    def __init__(self, repo: Path, where: dict[str, Any], used: set[tuple[str, str]]) -> None:
        self._repo, self._where, self._used = repo, where, used

    def at(self, **where: Any) -> Rows:
        """The rows where some columns have other values; a column that is None may have any."""
        return Rows(self._repo, selector(self._where, where), self._used)

    def __getattr__(self, column: str) -> Any:
        where = {key: value for key, value in self._where.items() if value is not None}
        name = where.pop("csv", None)
        rows = table(self._repo, name)
        unknown = {column, *where} - set(rows[0])
        if unknown:
            raise ValueError(f"names must be columns of {name}.csv, got {sorted(unknown)}")
        rows = [row for row in rows if all(_is(row[key], where[key]) for key in where)]
        if not rows:
            raise ValueError(f"a selector must fit a row of {name}.csv, got {where}")
        self._used.update((name, row.get("commit") or "") for row in rows)
        return np.array([float(row[column]) for row in rows])


class _Names(dict[str, Any]):
    """What an expression may name: functions, `at` and `of`, and columns of its rows."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(_FUNCTIONS, at=rows.at, of=self.of)
        self._rows = rows

    def __missing__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def of(self, expression: str, **where: Any) -> Any:
        """The value of an expression where some columns have other values."""
        return _evaluated(expression, self._rows.at(**where))


def _evaluated(expression: str, rows: Rows) -> Any:
    return eval(expression, {"__builtins__": {}}, _Names(rows))


def _is(cell: str, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(cell, each) for each in wanted)
    try:
        return float(cell) == float(wanted)
    except ValueError:
        return cell == str(wanted)


def value_of(
    repo: Path, address: str, where: dict[str, Any]
) -> tuple[float, tuple[tuple[str, str], ...]]:
    """The value of an expression, and the file and commit of every row that it comes from."""
    used: set[tuple[str, str]] = set()
    value = np.asarray(_evaluated(address, Rows(repo, where, used)))
    if value.size != 1:
        raise ValueError(f"an address must give one value (or take a median), got {value.size}")
    return float(value.item()), tuple(sorted(used))


def rounds_to(text: str, value: float) -> bool:
    """Whether a value, rounded to as many digits as the text shows, is the text."""
    digits, _, exponent = text.replace(",", "").partition("e")
    unit = 10.0 ** int(exponent or 0)
    last_digit = unit * 10.0 ** -len(digits.partition(".")[2])
    return abs(value - float(digits) * unit) <= last_digit * (0.5 + 1e-9)
