"""Evaluates adapters on their jobs' evaluation rows, many jobs packed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from tlora_megatron.ops.routing.host_copy import to_device
from tlora_megatron.ops.routing.segment_sums import segment_sums
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.nano.switch import NanoSwitch
from tlora_megatron.training.packing.packing import Item, MicroBatch, PackedBatch, Placed
from tlora_megatron.training.packing.round_packer import RoundPacker


class Scorer(Protocol):
    """Scores packed micro-batches with the backbone. An integration provides it."""

    @property
    def nano_batches(self) -> NanoSwitch | None:
        """Switches the number of nano-batches; None = micro-batches always run whole."""

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Scores each batch without gradients.

        Returns:
            Weighted losses `[T]` and whether the label is the first choice, bool `[T]`, for each
            batch; empty on pipeline stages other than the last.
        """
        ...


class Evaluation:
    """One evaluation of some of the jobs in the slots.

    Args:
        slots: the jobs of all slots.
        jobs: those to evaluate.
        packer: packs the rounds.
    """

    def __init__(
        self, slots: Sequence[JobState], jobs: Sequence[JobState], packer: RoundPacker
    ) -> None:
        self._jobs = jobs
        self._packer = packer
        evaluated = {job.name for job in jobs}
        rows = [job.data.eval if job.name in evaluated else () for job in slots]
        self._queues = [[Item(s, i, 0, 1.0) for i, s in enumerate(data)] for data in rows]
        self._begins = [sum(map(len, rows[:slot])) for slot in range(len(rows))]
        """Column of each slot's first sequence in the totals."""
        self._begin_of = {job.name: self._begins[slot] for slot, job in enumerate(slots)}
        device = packer.groups.device
        self._totals = torch.zeros(2, sum(map(len, rows)), dtype=torch.float64, device=device)
        """Loss and number of wrong first choices of every sequence."""

    def run(
        self, scorer: Scorer, *, first_slot: int, on_part: Callable[[], None]
    ) -> list[EvalResult | None]:
        """Scores all rows; None for a job that has none. Collective over the world."""
        queues = self._queues
        while any(queues):
            on_part()
            # A round's worth of each at a time: sorting all of them every round would not pay.
            counts = [self._packer.most_of_a_round(queue) for queue in queues]
            portions = [q[:n] for q, n in zip(queues, counts, strict=True)]
            packed = self._packer.pack_round(portions, first_slot=first_slot)
            rests = zip(packed.left, queues, counts, strict=True)
            queues = [left + queue[count:] for left, queue, count in rests]
            results = scorer.predict([batch.executed for batch in packed.micro_batches])
            scored = zip(packed.contents, packed.micro_batches, results, strict=False)
            for items, batch, (losses_T, right_T) in scored:
                self._add(items, batch, losses_T, right_T)
        dist.all_reduce(self._totals)
        losses, wrong = self._totals.tolist() if self._totals.numel() else ([], [])
        return [self._result(job, losses, wrong) for job in self._jobs]

    def _add(
        self,
        items: Sequence[Placed],
        micro_batch: MicroBatch,
        losses_T: torch.Tensor,
        right_T: torch.Tensor,
    ) -> None:
        """Adds a micro-batch's sums to the totals of its sequences."""
        if not self._packer.groups.counts_losses:
            return
        losses_T, right_T = map(micro_batch.restore_order, (losses_T, right_T))
        pieces = micro_batch.packed.view.pieces
        lengths = to_device(torch.tensor([p.length for p in pieces]), losses_T.device)
        wrong_T = (micro_batch.packed.weights > 0) & ~right_T
        sums = torch.stack(
            [segment_sums(losses_T, lengths), segment_sums(wrong_T.float(), lengths)]
        )
        # The padding's piece, if any, is the last one and has no item.
        placed = [items[p.index] for p in pieces if p.index < len(items)]
        index = torch.tensor(
            [self._begins[slot] + item.index for slot, item, _ in placed], dtype=torch.int64
        )
        totals = self._totals
        totals.index_add_(1, to_device(index, totals.device), sums[:, : len(placed)].double())

    def _result(
        self, job: JobState, losses: Sequence[float], wrong: Sequence[float]
    ) -> EvalResult | None:
        count = len(job.data.eval)
        if not count:
            return None
        begin = self._begin_of[job.name]
        targets = sum(int(s.is_target.sum()) for s in job.data.eval)
        return EvalResult(
            loss=sum(losses[begin : begin + count]) / targets,
            exact_match=sum(w == 0 for w in wrong[begin : begin + count]) / count,
        )
