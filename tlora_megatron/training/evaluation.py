"""Evaluates adapters on their jobs' evaluation rows, many jobs packed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tlora_megatron.ops.frozen.losses import segment_sums
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.nano.rounds import NanoSwitch
from tlora_megatron.training.packing.packing import Item, MicroBatch, PackedBatch
from tlora_megatron.training.packing.round_packer import RoundPacker


class Scorer(Protocol):
    """Scores packed micro-batches with the backbone. An integration provides it."""

    @property
    def nano_batches(self) -> NanoSwitch | None:
        """Switches the number of nano-batches; None = micro-batches always run whole."""

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """Scores each batch without gradients.

        Returns:
            Weighted losses `[T]` and whether the label is the first choice, bool `[T]`, for each
            batch; empty on pipeline stages other than the last.
        """
        ...


class Evaluation:
    """One evaluation of some of the jobs in the slots, which may take part after part.

    Args:
        jobs: those to evaluate; they must keep a slot and their weights until it is complete.
    """

    def __init__(
        self, slots: Sequence[JobState], jobs: Sequence[JobState], device: torch.device
    ) -> None:
        self._jobs = jobs
        evaluated = {job.name for job in jobs}
        rows = {job.name: job.sequences_to_score for job in slots if job.name in evaluated}
        ends = pairwise(accumulate(map(len, rows.values()), initial=0))
        self._columns = {name: slice(*pair) for name, pair in zip(rows, ends, strict=True)}
        """Columns of each job's sequences in the totals."""
        # Without dropout a row's number keys nothing: a sequence's column is in its place.
        self._queues = {
            name: [Item(s, i, self._columns[name].start + i, 1.0) for i, s in enumerate(data)]
            for name, data in rows.items()
        }
        self._totals = torch.zeros(
            2, sum(map(len, rows.values())), dtype=torch.float64, device=device
        )
        """Loss and number of wrong first choices of every sequence."""

    @property
    def is_complete(self) -> bool:
        return not any(self._queues.values())

    def part(
        self,
        scorer: Scorer,
        packer: RoundPacker,
        slots: Sequence[str],
        *,
        first_slot: int,
        micro_batches: int | None = None,
    ) -> None:
        """Scores the rows of one round; collective over the world.

        Context parallelism divides sequences by their place in a micro-batch, so there jobs go one
        after another: no job's scores depend on who is evaluated beside it.

        Args:
            micro_batches: at most so many of every replica; None = a round's worth of each job.
        """
        waiting = [name for name in slots if self._queues.get(name)]
        if packer.groups.layout.cp_size > 1:
            waiting = waiting[:1]
        queues = [self._queues[name] if name in waiting else [] for name in slots]
        packed = packer.pack_part(queues, first_slot=first_slot, micro_batches=micro_batches)
        left = zip(slots, packed.left, strict=True)
        self._queues |= {name: own for name, own in left if name in waiting}
        results = scorer.predict([batch.executed for batch in packed.micro_batches])
        for batch, (losses_T, right_T) in zip(packed.micro_batches, results, strict=False):
            if packer.groups.counts_losses:
                self._add(batch, losses_T, right_T)

    def results(self) -> list[EvalResult | None]:
        """The scores once all rows have some; None for a job without evaluation rows.

        A job of pairs that had no reference has one then. Collective over the world.
        """
        dist.all_reduce(self._totals)
        losses, wrong = self._totals.tolist() if self._totals.numel() else ([], [])
        results: list[EvalResult | None] = []
        for job in self._jobs:
            own = self._columns.get(job.name, slice(0))
            results.append(job.take_scores(losses[own], wrong[own]))
        return results

    def _add(self, micro_batch: MicroBatch, losses_T: Tensor, right_T: Tensor) -> None:
        """Adds a micro-batch's sums to the totals of its sequences."""
        losses_T, right_T = map(micro_batch.restore_order, (losses_T, right_T))
        pieces = micro_batch.packed.view.pieces
        lengths = to_device(torch.tensor([p.length for p in pieces]), losses_T.device)
        wrong_T = (micro_batch.packed.weights > 0) & ~right_T
        exact = micro_batch.packed.view.exactness is not None
        sums = torch.stack([segment_sums(x, lengths, exact=exact) for x in (losses_T, wrong_T)])
        # The padding's piece, if any, is the last one and of no job.
        view, totals = micro_batch.packed.view, self._totals
        columns = [p.document.first_token for p in pieces if p.document.slot < view.num_slots]
        index = to_device(torch.tensor(columns, dtype=torch.int64), totals.device)
        totals.index_add_(1, index, sums[:, : len(columns)].double())


class HeldJobs:
    """Jobs that are scored a micro-batch at a time while others train; they keep their slots."""

    def __init__(self) -> None:
        self._jobs: list[JobState] = []
        self._evaluation: Evaluation | None = None
        """Of the first of them, under way."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, jobs: Sequence[JobState]) -> None:
        """Holds jobs, which have rows to score, behind those that are held already."""
        for job in jobs:
            job.is_held = True
        self._jobs += jobs

    def score_part(
        self, device: torch.device, score: Callable[[Evaluation], None]
    ) -> tuple[JobState, EvalResult | None] | None:
        """Scores a part of the first job's rows; returns the job, held no more, behind the last."""
        job = self._jobs[0]
        if self._evaluation is None:
            self._evaluation = Evaluation([job], [job], device)
        score(self._evaluation)
        if not self._evaluation.is_complete:
            return None
        (result,) = self._evaluation.results()
        self.drop(job)
        job.is_held = False
        return job, result

    def drop(self, job: JobState) -> None:
        """Scores a job no more, if it is held."""
        if self._jobs and self._jobs[0] is job:
            self._evaluation = None
        self._jobs = [other for other in self._jobs if other is not job]
