"""Targets of the multi-adapter linear, and verdicts on measured rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from scripts.bench.linear.baselines import BASELINES
from scripts.bench.linear.results import geometric_mean

FEW = (1, 4, 16)
MANY = (64,)
LIMITS: tuple[tuple[int, tuple[int, ...], float], ...] = (
    (8192, FEW, 1.10),
    (16384, FEW, 1.10),
    (2048, FEW, 1.25),
    (8192, MANY, 1.15),
    (16384, MANY, 1.15),
    (2048, MANY, 1.45),
)
"""Tokens, numbers of adapters, geometric mean over shapes of the ratio without dropout."""
FP8_LIMITS: tuple[tuple[int, tuple[int, ...], float], ...] = ((8192, FEW, 0.68),)
"""The same over an FP8 base, whose times are held to the frozen linear of the wider dtype."""
DROPOUT_COST = 0.02
GROWTH = 1.05
"""From 4 to 64 adapters at 16384 tokens."""


class Verdict(NamedTuple):
    """One target of one provider."""

    what: str
    limit: float
    measured: float

    @property
    def line(self) -> str:
        """One line of a report."""
        word = "met" if self.measured <= self.limit else "NOT MET"
        return f"{self.what:52} <= {self.limit:.2f}: {self.measured:.3f}  {word}"


def verdicts(rows: Sequence[dict[str, Any]], provider: str) -> Iterator[Verdict]:
    """Every target that the rows of a provider have figures for."""
    own = [r for r in rows if r["provider"] == provider]
    for tokens, adapters, limit in FP8_LIMITS if provider == "tlora_fp8" else LIMITS:
        mean = _mean(own, tokens, adapters, 0.0)
        if mean is not None:
            yield Verdict(f"{provider}: {tokens} tokens, {_list(adapters)} adapters", limit, mean)
            dropped = _mean(own, tokens, adapters, 0.1)
            if dropped is not None:
                what = f"{provider}: {tokens} tokens, {_list(adapters)}, dropout 0.1 adds"
                yield Verdict(what, DROPOUT_COST, dropped - mean)
    few, many = _mean(own, 16384, (4,), 0.0), _mean(own, 16384, (64,), 0.0)
    if few is not None and many is not None:
        yield Verdict(f"{provider}: 16384 tokens, growth from 4 to 64", GROWTH, many / few)


def _list(adapters: Iterable[int]) -> str:
    return "/".join(map(str, adapters))


def _mean(
    rows: Sequence[dict[str, Any]], tokens: int, adapters: Sequence[int], dropout: float
) -> float | None:
    """Geometric mean over shapes; None unless every number of adapters has the same shapes."""
    found = [
        {r["shape"]: r["ratio"] for r in rows if _at(r, tokens, count, dropout)}
        for count in adapters
    ]
    if not found[0] or any(f.keys() != found[0].keys() for f in found):
        return None
    return geometric_mean(list(itertools.chain.from_iterable(f.values() for f in found)))


def _at(row: dict[str, Any], tokens: int, adapters: int, dropout: float) -> bool:
    return (row["tokens"], row["adapters"], row["dropout"]) == (tokens, adapters, dropout)


def beaten_by(rows: Sequence[dict[str, Any]], provider: str) -> list[str]:
    """Cells in which some baseline is at least as fast as a provider, with both ratios."""

    def cell(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["shape"], row["tokens"], row["adapters"], row["dropout"]

    own = {cell(r): r["ratio"] for r in rows if r["provider"] == provider}
    return [
        "{} {} x{} p={:g}: ".format(*cell(r))
        + f"{r['provider']} {r['ratio']:.3f}, {provider} {own[cell(r)]:.3f}"
        for r in rows
        if r["provider"] in BASELINES and cell(r) in own and r["ratio"] <= own[cell(r)]
    ]
