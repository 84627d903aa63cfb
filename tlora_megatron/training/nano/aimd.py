"""The paper's rule for the number of nano-batches, for comparison with `controller`'s."""

from __future__ import annotations

from statistics import median

from tlora_megatron.training.nano.controller import BLOCK, HYSTERESIS, WARM_UP, Phase, StepTime


class AimdController:
    """The paper's rule: 4 more while a horizon is faster than the one before, else half as many.

    As public accounts give it, with a margin of `HYSTERESIS`; the second horizon tries 4 more, to
    have something to compare. It never settles. tLoRA (arXiv 2602.07263), equation 2.

    Args:
        limit: the highest count.
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
        """Goes on with an earlier run's choice for a mix."""
        self.count = max(1, min(count, self.limit))

    def next_count(self, step: StepTime) -> int:
        """Takes the time of the step just done; returns the next count."""
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
