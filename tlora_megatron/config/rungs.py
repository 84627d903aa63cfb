"""Synchronous halving: which trials of a sweep go on from a rung, from their scores alone.

All trials at a rung are compared at once, so the choice depends on no order of arrival, layout or
restart. A trial that waits is held, and the others have its room, which is why nobody is idle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.sweep import SweepSpec


def steps_at(at: Sequence[float], num_steps: int) -> tuple[int, ...]:
    """The shares of a trial's steps, rounded up to whole ones."""
    return tuple(math.ceil(share * num_steps - 1e-9) for share in at)


def rung_steps(at: Sequence[float], num_steps: int, name: str) -> tuple[int, ...]:
    """Returns the steps behind which a trial of `num_steps` waits.

    Raises:
        ConfigError: if they are not apart from each other and from the end.
    """
    steps = steps_at(at, num_steps)
    if [*steps, num_steps] != sorted({*steps, num_steps}):
        raise ConfigError(
            f"sweep.stop.at must give rungs of their own before the end, got steps "
            f"{', '.join(map(str, steps))} of {num_steps} (job {name})"
        )
    return steps


def num_kept(count: int, keep: float) -> int:
    """How many of the trials at a rung go on: `ceil(count * keep)`."""
    return math.ceil(count * keep - 1e-9)


def ranked(scores: Mapping[str, float], *, prefers_more: bool) -> list[str]:
    """Names from best to worst; of equal scores the earlier name is better, a NaN is worst."""

    def place(entry: tuple[int, str]) -> tuple[bool, float, int]:
        number, name = entry
        score = scores[name]
        if not math.isfinite(score):
            return True, 0.0, number
        return False, -score if prefers_more else score, number

    return [name for _, name in sorted(enumerate(scores), key=place)]


class Decision(NamedTuple):
    """What has become of the trials at a rung."""

    rung: int
    kept: tuple[str, ...]
    stopped: Mapping[str, str]
    """Why each other one trains no more, by its name."""


class Halving:
    """The state of a sweep's rungs, the same on every process that is told the same.

    Args:
        steps: of the rungs, by trial, in the order of trials.
        known: what `document` gave before a restart.
    """

    def __init__(
        self,
        spec: SweepSpec,
        steps: Mapping[str, Sequence[int]],
        known: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        assert spec.stop is not None, "a sweep without rungs has no halving"
        self.steps = steps
        self._spec, self._keep, self._at = spec, spec.stop.keep, spec.stop.at
        self._scores: list[dict[str, float]] = [{} for _ in self._at]
        self._kept: list[tuple[str, ...] | None] = [None] * len(self._at)
        for rung, entry in enumerate(known):
            given = entry["scores"].items()
            self._scores[rung] = {n: math.nan if v is None else v for n, v in given}
            self._kept[rung] = None if entry["kept"] is None else tuple(entry["kept"])

    def left(self, name: str) -> tuple[int, ...]:
        """The steps of the rungs at which a trial still waits, if it is not stopped before."""
        return tuple(
            step for step, kept in zip(self.steps[name], self._kept, strict=True) if kept is None
        )

    def take(self, name: str, value: float) -> None:
        """Notes a trial's score at its next open rung; one that is known stays as it is."""
        if None in self._kept:
            self._scores[self._kept.index(None)].setdefault(name, value)

    def settle(self, active: Collection[str]) -> list[Decision]:
        """Decides the rungs at which nobody is missing any more.

        Args:
            active: trials that have not ended; what has failed or was cancelled counts as worst.
        """
        made = []
        while None in self._kept:
            rung = self._kept.index(None)
            entrants = self._entrants(rung)
            if any(name in active and name not in self._scores[rung] for name in entrants):
                break
            order = self._order(rung, active)
            kept = order[: num_kept(len(entrants), self._keep)]
            self._kept[rung] = tuple(name for name in entrants if name in kept and name in active)
            made.append(self.decision(rung, active))
        return made

    def decision(self, rung: int, active: Collection[str]) -> Decision:
        """What was decided at a rung, about the trials that were active then."""
        kept = self._kept[rung]
        assert kept is not None, f"rung {rung} is open"
        order = self._order(rung, active)
        stopped = {
            name: self._why(rung, order, name)
            for name in order
            if name in active and name not in kept
        }
        return Decision(rung, kept, stopped)

    def stopped_before(self) -> dict[str, str]:
        """Why trials were stopped at the rungs decided so far, by name."""
        found: dict[str, str] = {}
        for rung, kept in enumerate(self._kept):
            if kept is not None:
                scored = self._scores[rung]
                found |= self.decision(rung, scored).stopped
        return found

    def document(self) -> list[dict[str, Any]]:
        """Plain values of strict JSON, from which `known` takes up the same state."""
        return [
            {
                "at": at,
                "scores": {n: v if math.isfinite(v) else None for n, v in scores.items()},
                "kept": None if kept is None else list(kept),
            }
            for at, scores, kept in zip(self._at, self._scores, self._kept, strict=True)
        ]

    def _entrants(self, rung: int) -> Sequence[str]:
        kept = self._kept[rung - 1] if rung else tuple(self.steps)
        assert kept is not None, "rungs are decided in turn"
        return kept

    def _order(self, rung: int, active: Collection[str]) -> list[str]:
        """The trials at a rung from best to worst; those that trained no more are the last."""
        scores = {n: self._scores[rung].get(n, math.nan) for n in self._entrants(rung)}
        order = ranked(scores, prefers_more=self._spec.prefers_more)
        return sorted(order, key=lambda name: name not in active)

    def _why(self, rung: int, order: Sequence[str], name: str) -> str:
        def shown(other: str) -> str:
            value = self._scores[rung].get(other, math.nan)
            return f"{value:.4g}" if math.isfinite(value) else "not finite"

        place, last = order.index(name) + 1, num_kept(len(order), self._keep)
        return (
            f"stopped at step {self.steps[name][rung]}: {ordinal(place)} of {len(order)} by "
            f"{self._spec.metric} ({shown(name)}; the {ordinal(last)} has {shown(order[last - 1])})"
        )


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, `11th`, `21st`."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number // 10 % 10 == 1 else ending}"
