"""Chooses the number of nano-batches while training, from measured step times.

Pure: the same steps give the same choices, so ranks that are told the same times stay together. A
*step* here is what lies between two waits for the device: one round, or several that complete no
job's batch. Times are compared a token, and counts in blocks of a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

MOST_COUNT = 4
"""Counts that are tried. In a prototype on 4 H200s (NCCL beside compute) four were never faster
than two; one more takes longer to explore, and its lane of the collectives holds buffers."""
BLOCK = 3
"""Steps of a block: the median of three does not see one outlier."""
WARM_UP = 2
"""Steps thrown away before the first block: memory is reserved, kernels are loaded."""
HYSTERESIS = 0.01
"""Share of its time by which another count must be shorter than the one that is kept."""
_CLEARLY_WORSE = 0.05
"""Beyond the best: such a count is not measured a second time."""
_PATIENCE = 10
"""Steps that a new mix must last before it is explored: jobs often end one soon after another."""
_FIRST_CHECK, _LAST_CHECK = 200, 1600
"""Steps from one check of the choice to the next, doubled every time that it stands. A check takes
seven steps at the other count: under 1 % of the time if that is a quarter slower."""
_MOST_PASSED_OVER = 8
"""Steps in a row; then the mix is like this."""

Phase = Literal["explore", "keep", "check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One measured step."""

    time_s: float
    tokens: int
    """Tokens of all jobs in it."""
    mix_key: str
    """Changes with the jobs that train."""
    most: int
    """Nano-batches that its micro-batches could be cut into at most: their documents."""


class HysteresisController:
    """Keeps the count with the shortest time seen.

    Explores 1, 2, 3, ... in blocks and back again, so that a drift of all times cancels out; stops
    going up behind two counts in a row that are slower than the best. Takes another than 1 only if
    it is shorter by `HYSTERESIS` or, where that is more, by the noise. Explores anew when the mix
    of jobs changes to one that it has not seen. Later it checks its choice against 1 and the
    neighbouring counts, ever more rarely, and leaves it for what is shorter by as much.

    While times vary by less than half of `HYSTERESIS`, every change is to a count that is truly
    faster, so a mix sees at most `limit` - 1 of them.
    """

    def __init__(self, limit: int = MOST_COUNT) -> None:
        self.limit = limit
        """The highest count; may be set between steps, to no less than has been the count."""
        self.count = 1
        """Number of nano-batches of the next step."""
        self.kept = 1
        """The choice, in this mix or until it is explored the one before."""
        self.phase: Phase = "explore"
        """Purpose of the next step: explore counts, keep the choice, or check it."""
        self._mix: str | None = None
        self._chosen: dict[str, int] = {}
        """The choice by mix."""
        self._most = 1
        self._skip = self._passed_over = 0
        self._tokens: list[int] = []
        """Tokens of the mix's latest steps."""
        self._block: list[float] = []
        self._blocks: dict[int, list[list[float]]] = {}
        """Seconds a token of the trial's blocks, by count."""
        self._way_back: list[int] | None = None
        """Counts that the trial has yet to see a second time, the next one last; None while it goes
        forth."""
        self._until_trial = self._interval = _FIRST_CHECK
        self._checks = 0
        self._challenger = 1
        """The count that a check compares with the choice."""

    def chosen(self, mix_key: str) -> int | None:
        """The choice for a mix; None before there is one."""
        return self._chosen.get(mix_key)

    def resume(self, mix_key: str, count: int) -> None:
        """Goes on with an earlier run's choice for a mix."""
        self._chosen[mix_key] = self.kept = self.count = max(1, min(count, self.limit))
        self.phase = "keep"

    def next_count(self, step: StepTime) -> int:
        """Takes the time of the step just done, at the present count; returns the next count."""
        if step.mix_key != self._mix:
            self._begin_mix(step)
            return self.count
        self._most = max(self._most, step.most)
        if self._counts(step):
            self._add(step.time_s / step.tokens)
        return self.count

    @property
    def times(self) -> dict[int, float]:
        """Seconds a token of the counts in the latest trial."""
        return {
            count: sum(map(median, blocks)) / len(blocks) for count, blocks in self._blocks.items()
        }

    def _begin_mix(self, step: StepTime) -> None:
        """Goes to a new mix of jobs; this step does not count, since memory is reserved anew."""
        is_first = self._mix is None
        self._mix, self._most, self._tokens = step.mix_key, step.most, []
        self._interval = _FIRST_CHECK
        if step.mix_key in self._chosen:
            self.kept = self._chosen[step.mix_key]
            self._keep(_FIRST_CHECK)
        elif is_first:
            self._begin_trial("explore", 1)
            self._skip = WARM_UP - 1
        else:
            self._keep(_PATIENCE)

    def _counts(self, step: StepTime) -> bool:
        """False for a step whose time says nothing: right behind a change, or of a small rest."""
        if self._skip:
            self._skip -= 1
            return False
        self._tokens = [*self._tokens[-15:], step.tokens]
        is_odd = step.most < self.count or 2 * step.tokens < median(self._tokens)
        if is_odd and self._passed_over < _MOST_PASSED_OVER:
            self._passed_over += 1
            return False
        self._passed_over = 0
        return step.tokens > 0

    def _add(self, time_s: float) -> None:
        if self.phase == "keep":
            self._until_trial -= 1
            if self._until_trial <= 0:
                self._begin_next_trial()
            return
        self._block.append(time_s)
        if len(self._block) == BLOCK:
            self._blocks.setdefault(self.count, []).append(self._block)
            self._block = []
            self._next_block()

    def _next_block(self) -> None:
        """Goes to the trial's next count, or ends it."""
        if self._way_back is None:
            following = self._following()
            if following is not None:
                self._go_to(following)
                return
            times = self.times
            near = min(times.values()) * (1.0 + _CLEARLY_WORSE)
            self._way_back = [n for n in times if times[n] <= near or n in (1, self.kept)]
        if self._way_back:
            self._go_to(self._way_back.pop())
        else:
            self._decide()

    def _following(self) -> int | None:
        """Returns the next count on the way up; None at its end."""
        if self.phase == "check":
            return None if self._challenger in self._blocks else self._challenger
        times = self.times
        best = min(times.values())
        above = best * (1.0 + self._margin())
        if all(times.get(n, 0.0) > above for n in (self.count, self.count - 1)):
            return None
        return self.count + 1 if self.count < min(self.limit, self._most) else None

    def _decide(self) -> None:
        times = self.times
        best = min(times, key=lambda count: times[count])
        held = self.kept if self.phase == "check" else 1
        if times[best] >= times[held] * (1.0 - self._margin()):
            best = held
        stands = self.phase == "check" and best == self.kept
        self._interval = min(2 * self._interval, _LAST_CHECK) if stands else _FIRST_CHECK
        self.kept = best
        assert self._mix is not None, "a trial has a mix"
        self._chosen[self._mix] = best
        self._keep(self._interval)

    def _keep(self, steps: int) -> None:
        """Keeps the choice for a number of steps."""
        self.phase, self._until_trial = "keep", steps
        self._go_to(self.kept)

    def _begin_next_trial(self) -> None:
        """Explores a mix that is new; else checks the choice against 1 or a count beside it."""
        if self._mix not in self._chosen:
            self._begin_trial("explore", 1)
            return
        top = min(self.limit, self._most)
        others = [n for n in (1, self.kept + 1, self.kept - 1) if n != self.kept and 1 <= n <= top]
        if not others:
            self._until_trial = self._interval
            return
        self._challenger = others[self._checks % len(others)]
        self._checks += 1
        self._begin_trial("check", self.kept)

    def _begin_trial(self, phase: Phase, first: int) -> None:
        self.phase = phase
        self._block, self._blocks, self._way_back = [], {}, None
        self._go_to(first)

    def _go_to(self, count: int) -> None:
        self._skip = int(count != self.count)
        self.count = count

    def _margin(self) -> float:
        """Share by which two counts must differ: the hysteresis, or twice their noise.

        A block's range is 1.59 standard deviations in the middle, for normal noise; a median of
        three deviates by 0.67 of one, the mean of two such by 0.47, and their difference by 0.67.
        """
        ranges = [
            (max(block) - min(block)) / median(block)
            for blocks in self._blocks.values()
            for block in blocks
        ]
        return max(HYSTERESIS, 2 * 0.67 / 1.59 * median(ranges))


class AimdController:
    """The paper's rule: 4 more while a horizon is faster than the one before, else half as many.

    As public accounts give it, with a margin of `HYSTERESIS`; the second horizon tries 4 more, to
    have something to compare. It never settles. tLoRA (arXiv 2602.07263), equation 2.
    """

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self.count = 1
        self.phase: Phase = "explore"
        self._skip = WARM_UP
        self._block: list[float] = []
        self._before: float | None = None

    @property
    def kept(self) -> int:
        """The present count; no choice is ever kept."""
        return self.count

    def chosen(self, mix_key: str) -> int:
        """Returns the present count, whatever the mix."""
        return self.count

    def resume(self, mix_key: str, count: int) -> None:
        self.count = max(1, min(count, self.limit))

    def next_count(self, step: StepTime) -> int:
        if self._skip or not step.tokens:
            self._skip = max(0, self._skip - 1)
            return self.count
        self._block.append(step.time_s / step.tokens)
        if len(self._block) == BLOCK:
            time_s, self._block = median(self._block), []
            is_faster = self._before is None or time_s <= self._before * (1.0 - HYSTERESIS)
            self._before = time_s
            wanted = self.count + 4 if is_faster else max(1, self.count // 2)
            wanted = min(wanted, self.limit, max(1, step.most))
            self._skip = int(wanted != self.count)
            self.count = wanted
        return self.count


NanoController = HysteresisController | AimdController
"""Chooses the number of nano-batches."""
