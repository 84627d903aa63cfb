"""Bounds the speed of a layout's plans from above, without filling rounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import ROW_TILE
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad

_MARGIN = 1.03
"""Factor on the bound: small rounds may hold jobs whose attention is cheaper than the mean, and
the longest sequences that are drawn are shorter than expected."""
_STAGE_DEPTH = 4
"""Most micro-batches for each stage, as `training.packing` chooses them."""
_GRID = [round(2 ** (power / 4)) for power in range(85)]
"""Lengths at which the distribution of the longest sequence is looked at."""


class SpeedBound:
    """Bounds for one mix of jobs on one model and machine.

    A round takes at least as long as its slowest stage computes layers, with as many micro-batches
    as are best, each of which holds its part of the rows, and one of them the longest sequence; and
    every job's step.

    Args:
        model: of the same jobs.
        is_full: the number of micro-batches may be any, as Megatron-LM's trainer fixes it.
    """

    def __init__(self, model: CostModel, *, is_full: bool) -> None:
        self._model, self._is_full = model, is_full
        jobs = model.jobs
        self._tokens = sum(job.batch_tokens for job in jobs)
        self._job_tokens = tuple(job.batch_tokens for job in jobs)
        self._job_sequences = tuple(float(job.batch_size) for job in jobs)
        self._longest = expected_longest(jobs)
        self._flat: dict[object, float] = {}

    def loose(self, layout: Plan, budget: int, shardings: Sequence[LoraSharding]) -> float:
        """A bound that takes rows for as fast as those of the largest micro-batches.

        Args:
            budget: the largest of the layout.
        """
        experts = layout.ep_size, layout.expert_tp_size
        key = layout.tp_size, layout.sequence_parallel, *experts, shardings
        if key not in self._flat:
            plan = replace(layout, cp_size=1, dp_size=1, pp_size=1, vpp_size=1)
            plan = replace(plan, first_stage_layers=None, last_stage_layers=None)
            whole = max(budget // layout.cp_size, 1)
            self._flat[key] = self._layer_s(plan, whole, 1.0, shardings) / whole
        a_row = self._flat[key] / layout.cp_size
        return self._speed(layout, budget, lambda rows, count: rows * a_row, 0.0)

    def tight(self, layout: Plan, budget: int, shardings: Sequence[LoraSharding]) -> float:
        """A bound with the times of the very sizes, and of the jobs' steps."""
        steps_s = min(
            self._model.all_steps_s(replace(layout, lora_sharding=sharding))
            for sharding in shardings
        )

        def layer_s(rows: float, count: float) -> float:
            whole = max(rows, ROW_TILE * layout.cp_size)
            return self._layer_s(layout, whole, count, shardings)

        return self._speed(layout, budget, layer_s, steps_s)

    def _speed(
        self,
        layout: Plan,
        budget: int,
        layer_s: Callable[[float, float], float],
        steps_s: float,
    ) -> float:
        """The speed with the best number of micro-batches.

        Args:
            layer_s: seconds of a layer by rows and number of micro-batches.
        """
        slowest, all_layers = max(layout.stages(self._model.spec)), self._model.spec.num_layers
        best_s = math.inf
        for count in self._counts(layout):
            rows = max(self._tokens / (layout.dp_size * count), self._longest)
            rounds = max(1.0, rows / budget)
            # All stages but the slowest one are filled and drained.
            layers = count * slowest + (all_layers - slowest) / layout.vpp_size
            time_s = rounds * layers * layer_s(min(rows, budget), count)
            best_s = min(best_s, time_s)
        return _MARGIN * self._tokens / (best_s + steps_s)

    def _counts(self, layout: Plan) -> set[float]:
        """Numbers of micro-batches of which one is the best: fewest, most, and just enough."""
        pp_size, is_plain = layout.pp_size, layout.vpp_size == 1
        if pp_size == 1 and not self._is_full:
            return {1.0}
        least = 1.0 if self._is_full and is_plain else float(pp_size)
        most = float(_STAGE_DEPTH * pp_size)
        enough = self._tokens / (layout.dp_size * self._longest)
        return {least, most, min(max(enough, least), most)}

    def _layer_s(
        self, layout: Plan, rows: float, count: float, shardings: Sequence[LoraSharding]
    ) -> float:
        """Seconds of a layer with all the communication hidden that nano-batches ever hide."""
        hardware = self._model.hardware
        load = RoundLoad(
            micro_batches=count,
            rows=float(rows),
            job_tokens=self._job_tokens,
            job_sequences=self._job_sequences,
            steps=(),
        )
        costs = [
            self._model.layers.cost(replace(layout, lora_sharding=sharding), load)
            for sharding in shardings
        ]
        least = min(cost.total_s - hardware.nano_overlap * cost.tp_comm_s for cost in costs)
        return max(least, hardware.host.layer_s)


def expected_longest(jobs: Sequence[JobLoad]) -> float:
    """The expected rows of the longest sequence in a batch of every job, not exceeded."""
    expected = 0.0
    for before, length in itertools.pairwise([0, *_GRID]):
        shorter = 0.0
        for job in jobs:
            share = sum(share for n, share in job.lengths.pairs if n < length)
            shorter += job.batch_size * math.log(share) if share else -math.inf
        expected += (length - before) * (1.0 - math.exp(min(0.0, shorter)))
    return expected
