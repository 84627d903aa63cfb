"""The super-model: one frozen backbone, many adapters, one round at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.ops.routing.host_copy import to_device
from tlora_megatron.ops.routing.segment_sums import segment_sums
from tlora_megatron.ops.routing.segments import MicroBatchView
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano.cuts import CutDocuments, cut_by_length
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.optimizer import StepOutcome, StepRequest, step_adapters
from tlora_megatron.training.packing.packing import (
    Bins,
    Item,
    PackedBatch,
    Placed,
    RoundShape,
    fill_bins,
)
from tlora_megatron.training.packing.portions import fill_with_portions
from tlora_megatron.training.packing.round_rows import RoundRows


class Engine(Protocol):
    """Runs packed micro-batches through the backbone. An integration provides it."""

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Accumulates gradients in the bank; returns weighted losses `[T]` a micro-batch.

        Empty on pipeline stages other than the last. All batches have the same number of rows.
        """
        ...

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Losses `[T]` and whether the label is the first choice, bool `[T]`; no gradients."""
        ...


class StepReport(NamedTuple):
    """One optimizer step of one job."""

    job: JobState
    outcome: StepOutcome
    lr: float
    tokens: int
    target_tokens: int
    time_s: float


class SuperModel:
    """Trains the active jobs together.

    A job that is not active is a placeholder (`JobState.placeholder`): its sequences are packed
    like the others', and it steps past its batches, but it is neither updated nor reported.

    Args:
        jobs: in slot order.
        micro_batch_tokens: token budget of one micro-batch, over its context-parallel ranks.
        round_shape: what the driver fixes of rounds; may be changed between them.
    """

    def __init__(
        self,
        engine: Engine,
        bank: AdapterBank,
        groups: ParallelGroups,
        jobs: Sequence[JobState],
        *,
        micro_batch_tokens: int,
        round_shape: RoundShape = RoundShape(),  # noqa: B008 - frozen
    ) -> None:
        self.engine = engine
        self.bank = bank
        self.groups = groups
        self.micro_batch_tokens = micro_batch_tokens
        self.round_shape = round_shape
        self.cut_documents: CutDocuments = cut_by_length
        """Where a micro-batch is cut into nano-batches; may be set between rounds."""
        self.jobs: tuple[JobState, ...] = ()
        self.bins: Bins | None = None
        """Of the round, or evaluation, packed last; the same on every rank."""
        self.nano_batches_run: Counter[int] = Counter()
        """This replica's micro-batches of training by the number of nano-batches they ran in."""
        self._rounds = 0
        self._round_begin_s = 0.0
        self._batches: list[PackedBatch] = []
        """Of the round under way."""
        self.set_jobs(jobs)

    def set_jobs(self, jobs: Sequence[JobState]) -> None:
        """Gives the adapters of `jobs` the slots; those left out leave the super-model."""
        self.jobs = tuple(jobs)
        self.bank.install([job.adapter for job in jobs])

    def train_round(self) -> list[StepReport]:
        """Runs one round on the engine and steps every job whose global batch it completed."""
        return self.end_round(self.engine.forward_backward(self.begin_round()))

    def begin_round(self) -> list[PackedBatch]:
        """Packs a round: this rank's micro-batches, to be run forward and backward in this order.

        `end_round` follows before the next one, an evaluation, or `set_jobs`.
        """
        self._round_begin_s = time.perf_counter()
        for job in self.jobs:
            job.begin_batch(self.groups.device)
        keys = [job.dropout_key for job in self.jobs]
        self._batches, left, _ = self._pack_round([job.queue for job in self.jobs], keys)
        for job, queue in zip(self.jobs, left, strict=True):
            job.queue = queue
        ran = (batch.to_run.view.nano_views for batch in self._batches)
        self.nano_batches_run.update(max(1, len(views)) for views in ran)
        return self._batches

    def end_round(self, losses: Sequence[torch.Tensor]) -> list[StepReport]:
        """Steps every job whose global batch the round completed.

        Args:
            losses: as `Engine.forward_backward` returns them.
        """
        for batch, losses_T in zip(self._batches, losses, strict=False):
            self._add_losses(batch.view, losses_T)
        self._batches = []
        self._rounds += 1
        complete = self._end_placeholders()
        outcomes = step_adapters(self.bank, self.groups, [self._request(slot) for slot in complete])
        round_s = time.perf_counter() - self._round_begin_s
        for job in self.jobs:
            job.batch_time_s += round_s
        return [self._report(self.jobs[s], o) for s, o in zip(complete, outcomes, strict=True)]

    def _end_placeholders(self) -> list[int]:
        """Moves placeholders past completed batches; returns the slots of jobs that completed."""
        complete = [slot for slot, job in enumerate(self.jobs) if not job.queue]
        for slot in complete:
            if not self.jobs[slot].is_active:
                self.jobs[slot].end_batch()
        return [slot for slot in complete if self.jobs[slot].is_active]

    def evaluate(self, jobs: Sequence[JobState]) -> list[EvalResult | None]:
        """Evaluates adapters on their jobs' evaluation rows, packed together; None without any."""
        queues: list[list[Item]] = [[] for _ in self.jobs]
        sizes = [0] * len(self.jobs)
        slots = {job.name: slot for slot, job in enumerate(self.jobs)}
        for job in jobs:
            slot = slots[job.name]
            sizes[slot] = len(job.data.eval)
            queues[slot] = [Item(s, i, 0, 1.0) for i, s in enumerate(job.data.eval)]
        offsets = [sum(sizes[:slot]) for slot in range(len(sizes))]
        totals = torch.zeros(2, sum(sizes), dtype=torch.float64, device=self.groups.device)
        while any(queues):
            counts = [self._most_of_a_round(queue) for queue in queues]
            portions = [q[:n] for q, n in zip(queues, counts, strict=True)]
            batches, left, placed = self._pack_round(portions, ())
            queues = [rest + q[n:] for rest, q, n in zip(left, queues, counts, strict=True)]
            results = self.engine.predict(batches)
            for items, batch, result in zip(placed, batches, results, strict=False):
                self._add_predictions(totals, offsets, items, batch, *result)
        dist.all_reduce(totals)
        losses, wrong = totals.tolist() if totals.numel() else ([], [])
        return [self._eval_result(job, losses, wrong, offsets[slots[job.name]]) for job in jobs]

    def _most_of_a_round(self, queue: Sequence[Item]) -> int:
        """Items of a queue that could fill a round alone: sorting all of them would not pay."""
        layout = self.groups.layout
        most = self.round_shape.num_micro_batches or 4 * layout.pp_size
        room = self.micro_batch_tokens * layout.dp_size * most
        for count, item in enumerate(queue):
            if room <= 0:
                return count
            room -= item.length
        return len(queue)

    def _pack_round(
        self, queues: Sequence[list[Item]], keys: Sequence[int]
    ) -> tuple[list[PackedBatch], list[list[Item]], list[tuple[Placed, ...]]]:
        """This rank's micro-batches, padded to one length; what is left queued; who is where.

        Args:
            keys: of the slots' dropout; none when evaluating.
        """
        layout, shape = self.groups.layout, self.round_shape
        rows = RoundRows(
            groups=self.groups,
            micro_batch_tokens=self.micro_batch_tokens,
            fills_budget=shape.fills_budget,
            active=tuple(job.is_active for job in self.jobs),
            dropout_keys=tuple(keys),
            num_nano_batches=getattr(self.engine, "num_nano_batches", 1),
            cut=self.cut_documents,
        )
        fill = fill_bins
        if shape.portion_tokens is not None and keys:
            fill = partial(fill_with_portions, portion_tokens=shape.portion_tokens)
        bins, left = fill(
            queues,
            capacity=rows.capacity(queues),
            dp_size=layout.dp_size,
            pp_size=layout.pp_size,
            first_slot=self._rounds,
            num_micro_batches=shape.num_micro_batches,
        )
        self.bins = bins
        mine = bins.of_rank(self.groups.dp_rank)
        return rows.pack(mine), left, [rows.items(placed) for placed in mine]

    def _add_losses(self, view: MicroBatchView, losses_T: torch.Tensor) -> None:
        if not self.groups.counts_losses:
            return
        rows = view.rows
        lengths = to_device(torch.tensor(rows.lengths), losses_T.device)
        sums_S = segment_sums(losses_T, lengths)
        for slot in rows.present_slots:
            loss = self.jobs[slot].loss
            assert loss is not None, f"job {self.jobs[slot].name} has rows but no batch"
            loss.add_(sums_S[slot])

    def _request(self, slot: int) -> StepRequest:
        job = self.jobs[slot]
        assert job.loss is not None, f"job {job.name} steps without a batch"
        return StepRequest(slot, job.spec.optimizer, job.lr, job.updates, job.loss)

    def _report(self, job: JobState, outcome: StepOutcome) -> StepReport:
        lr, time_s = job.lr, job.batch_time_s
        tokens, target_tokens = job.end_batch()
        job.updates += outcome.applied
        job.nonfinite_in_a_row = 0 if outcome.applied else job.nonfinite_in_a_row + 1
        job.last_loss = outcome.loss
        return StepReport(job, outcome, lr, tokens, target_tokens, time_s)

    def _add_predictions(
        self,
        totals: torch.Tensor,
        offsets: Sequence[int],
        items: Sequence[Placed],
        batch: PackedBatch,
        losses_T: torch.Tensor,
        right_T: torch.Tensor,
    ) -> None:
        if not self.groups.counts_losses:
            return
        pieces = batch.view.pieces
        lengths = to_device(torch.tensor([p.length for p in pieces]), losses_T.device)
        wrong_T = (batch.weights > 0) & ~right_T
        sums = torch.stack(
            [segment_sums(losses_T, lengths), segment_sums(wrong_T.float(), lengths)]
        )
        # The padding's piece, if any, is the last one and has no item.
        placed = [items[p.index] for p in pieces if p.index < len(items)]
        index = torch.tensor(
            [offsets[slot] + item.index for slot, item in placed], dtype=torch.int64
        )
        totals.index_add_(1, to_device(index, totals.device), sums[:, : len(placed)].double())

    def _eval_result(
        self, job: JobState, losses: Sequence[float], wrong: Sequence[float], begin: int
    ) -> EvalResult | None:
        count = len(job.data.eval)
        if not count:
            return None
        targets = sum(int(s.is_target.sum()) for s in job.data.eval)
        return EvalResult(
            loss=sum(losses[begin : begin + count]) / targets,
            exact_match=sum(w == 0 for w in wrong[begin : begin + count]) / count,
        )
