"""The super-model: one frozen backbone, many adapters, one round at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.ops.frozen.losses import segment_sums
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import CutDocuments, cut_by_length
from tlora_megatron.training.driven_jobs import collect
from tlora_megatron.training.evaluation import Evaluation, Scorer
from tlora_megatron.training.job_state import EvalResult, JobState
from tlora_megatron.training.optimizer import StepOutcome, StepRequest, step_adapters
from tlora_megatron.training.packing.packing import (
    Item,
    MicroBatch,
    PackedBatch,
    Round,
    RoundShape,
)
from tlora_megatron.training.packing.portions import FilledRound, RoundRule
from tlora_megatron.training.packing.round_packer import RoundPacker
from tlora_megatron.training.preference import Scores, named, sum_pairs
from tlora_megatron.training.round_timing import BusyShare, RateCorrection, RoundTiming

CutFor = Callable[[Sequence[JobState]], CutDocuments]
"""From the jobs in slot order to where their micro-batches are cut into nano-batches."""


class Engine(Scorer, Protocol):
    """Trains packed micro-batches through the backbone, too."""

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Accumulates gradients in the bank; returns weighted losses `[T]` of each batch.

        Of rows of clients and of pairs these are `-log p`. Empty on pipeline stages other than the
        last. In a pipeline there is at least one batch, and all have the same number of rows;
        without one there may be none.
        """
        ...


EngineT = TypeVar("EngineT", bound=Scorer, covariant=True)


class StepReport(NamedTuple):
    """One optimizer step of one job."""

    job: JobState
    outcome: StepOutcome
    lr: float
    tokens: int
    target_tokens: int
    time_s: float
    scores: Scores
    """Those of a batch of pairs; empty for other jobs."""


class SuperModel(Generic[EngineT]):
    """Trains the active jobs together.

    A job that is not active is a placeholder (`JobState.placeholder`): its sequences are packed
    like the others', and it steps past its batches, but it is neither updated nor reported.

    Args:
        engine: an `Engine`; a `Scorer` is enough where a trainer runs the training rounds, between
            `begin_round` and `end_round`.
        micro_batch_tokens: token budget of one micro-batch, over its context-parallel ranks.
        timing: shares rounds out by predicted time; None = balances tokens.
        correction: of the speeds in `timing`; None = they stay as predicted.
    """

    def __init__(
        self,
        engine: EngineT,
        bank: AdapterBank,
        groups: ParallelGroups,
        jobs: Sequence[JobState],
        *,
        micro_batch_tokens: int,
        round_shape: RoundShape = RoundShape(),  # noqa: B008 - frozen
        cut_for: CutFor = lambda _: cut_by_length,
        timing: RoundTiming | None = None,
        correction: RateCorrection | None = None,
    ) -> None:
        self.engine = engine
        self.bank = bank
        self.groups = groups
        self.micro_batch_tokens = micro_batch_tokens
        self.round_shape = round_shape
        self.jobs: tuple[JobState, ...] = ()
        self.round: Round | None = None
        """Contents of the training round packed last; the same on every rank."""
        self.nano_batches_run: Counter[int] = Counter()
        """This replica's micro-batches of training by the number of nano-batches they ran in."""
        self.cp_sizes_run: Counter[int] = Counter()
        """This process's micro-batches of training by the context-parallel ranks that ran them."""
        self.timing = timing
        self.correction = correction
        self.busy = BusyShare()
        """The share of the rounds so far in which replicas were busy, by prediction."""
        self.rule: RoundRule | None = None
        """The rule by which the present jobs' rounds are shared out; None = by tokens."""
        self._cut_for = cut_for
        self._ahead: tuple[object, FilledRound] | None = None
        """The next round, and the jobs and queues for which it was filled."""
        self._rounds = 0
        self._round_begin_s = 0.0
        self._micro_batches: list[MicroBatch] = []
        """The round under way."""
        self.set_jobs(jobs)

    def set_jobs(self, jobs: Sequence[JobState]) -> None:
        """Gives the adapters of `jobs` the slots; those left out leave the super-model."""
        self.jobs = tuple(jobs)
        self._cut = self._cut_for(self.jobs)
        self._use_corrected()
        if self.timing is not None and self.jobs:
            self.rule = self.timing.rule(self.jobs, speaks=self.groups.is_writer)
        self.bank.install([job.adapter for job in jobs])

    def train_round(self: SuperModel[Engine]) -> list[StepReport]:
        """Runs one round on the engine and steps every job whose global batch it completed."""
        batches = self.begin_round()
        if self.correction is None:
            return self.end_round(self.engine.forward_backward(batches))
        assert self.round is not None, "begin_round has filled one"
        with self.correction.measured(self.round):
            losses = self.engine.forward_backward(batches)
        return self.end_round(losses)

    def settle_rates(self) -> str | None:
        """Corrects the speeds of replicas by the rounds so far; collective over the world.

        Returns:
            What to keep with the checkpoints that are taken now; None if there is nothing.
        """
        if self.correction is None:
            return None
        self.correction.settle()
        self._use_corrected()
        return self.correction.state()

    def _use_corrected(self) -> None:
        if self.timing is None or self.correction is None:
            return
        rates = self.correction.rates
        self.timing = replace(self.timing, rates=rates)
        if self.rule is not None:
            self.rule = replace(self.rule, rates=rates)

    def begin_round(self) -> list[PackedBatch]:
        """Packs a round: this rank's micro-batches, to be run forward and backward in this order.

        `end_round` must follow before the next round, an evaluation, or `set_jobs`.
        """
        self._round_begin_s = time.perf_counter()
        for job in self.jobs:
            job.begin_batch(self.groups.device)
        packer = self._packer([job.dropout_key for job in self.jobs])
        packed = packer.pack_filled(self._next_round(packer))
        if self.timing is not None:
            self.busy.add(self.timing.ends_ps(packed.round))
        self.round, self._micro_batches = packed.round, packed.micro_batches
        for job, queue in zip(self.jobs, packed.left, strict=True):
            job.queue = queue
        batches = [micro_batch.executed for micro_batch in self._micro_batches]
        self.nano_batches_run.update(max(1, len(batch.view.nano_views)) for batch in batches)
        self.cp_sizes_run.update(batch.view.cp_size for batch in batches)
        return batches

    def _next_round(self, packer: RoundPacker) -> FilledRound:
        """Takes the round that was filled ahead, or fills one if the jobs are others by now."""
        ahead, self._ahead = self._ahead, None
        waiting = [(job.name, job.step, len(job.queue)) for job in self.jobs]
        if ahead is not None and ahead[0] == (self._rounds, self.rule, waiting):
            return ahead[1]
        return packer.fill_round([job.queue for job in self.jobs], first_slot=self._rounds)

    def _fill_ahead(self) -> None:
        """Fills the next round while the device runs this one, as if every job went on."""
        if self.rule is None or any(job.is_at_end or job.is_held for job in self.jobs):
            return
        number, packer = self._rounds + 1, self._packer([job.dropout_key for job in self.jobs])
        queues = [job.items_ahead() for job in self.jobs]
        waiting = [
            (job.name, job.step + (not job.queue), len(queue))
            for job, queue in zip(self.jobs, queues, strict=True)
        ]
        filled = packer.fill_round(queues, first_slot=number)
        self._ahead = (number, self.rule, waiting), filled

    def end_round(self, losses: Sequence[Tensor]) -> list[StepReport]:
        """Steps every job whose global batch the round completed.

        Args:
            losses: weighted losses `[T]` of each batch that `begin_round` returned; empty on
                pipeline stages other than the last.
        """
        self._fill_ahead()
        for micro_batch, losses_T in zip(self._micro_batches, losses, strict=False):
            self._add_losses(micro_batch, losses_T)
            if micro_batch.packed.sent is not None and self.groups.counts_losses:
                collect(self.jobs, micro_batch, losses_T)
        self._micro_batches = []
        self._rounds += 1
        complete = self._end_placeholders()
        scores = self._sum_pairs(complete)
        requests = [self._request(slot) for slot in complete]
        exact = self.round_shape.exactness is not None
        outcomes = step_adapters(self.bank, self.groups, requests, exact=exact)
        round_s = time.perf_counter() - self._round_begin_s
        for job in self.jobs:
            job.batch_time_s += round_s
        return [
            self._report(self.jobs[slot], outcome, scores.get(slot))
            for slot, outcome in zip(complete, outcomes, strict=True)
        ]

    def _sum_pairs(self, complete: Sequence[int]) -> dict[int, Tensor]:
        """Gives complete batches of pairs their losses; returns their scores by slot."""
        own = {slot: self.jobs[slot] for slot in complete}
        batches = {s: (j.items(j.step), j.nll_T) for s, j in own.items() if j.nll_T is not None}
        found = dict(zip(batches, sum_pairs([*batches.values()]), strict=True))
        for slot, (loss, _) in found.items():
            # The world's losses are summed: one rank counts it.
            own[slot].loss = loss.float() * self.groups.is_writer
        return {slot: scores for slot, (_, scores) in found.items()}

    def evaluate(
        self, jobs: Sequence[JobState], on_part: Callable[[], None] = lambda: None
    ) -> list[EvalResult | None]:
        """Evaluates adapters on their jobs' evaluation rows, packed together; None without any."""
        evaluation = Evaluation(self.jobs, jobs, self.groups.device)
        while not evaluation.is_complete:
            on_part()
            self.evaluate_part(evaluation)
        return evaluation.results()

    def evaluate_part(self, evaluation: Evaluation, *, micro_batches: int | None = None) -> None:
        """Scores some of the rows that an evaluation has left; the jobs' slots may have changed.

        Args:
            micro_batches: at most so many of every replica; None = a round's worth of each job.
        """
        evaluation.part(
            self.engine,
            self._packer(()),
            [job.name for job in self.jobs],
            first_slot=self._rounds,
            micro_batches=micro_batches,
        )

    def forward_part(self, queues: Sequence[list[Item]]) -> list[list[Item]]:
        """Runs some of the sequences of clients without gradients; at most a micro-batch each.

        Returns:
            What is left of each.
        """
        packed = self._packer(()).pack_part(queues, first_slot=self._rounds, micro_batches=1)
        results = self.engine.predict([batch.executed for batch in packed.micro_batches])
        for micro_batch, (nll_T, _) in zip(packed.micro_batches, results, strict=False):
            if micro_batch.packed.sent is not None and self.groups.counts_losses:
                collect(self.jobs, micro_batch, nll_T)
        return packed.left

    def _packer(self, dropout_keys: Sequence[int]) -> RoundPacker:
        switch = self.engine.nano_batches
        return RoundPacker(
            groups=self.groups,
            micro_batch_tokens=self.micro_batch_tokens,
            shape=self.round_shape,
            active=tuple(job.is_active for job in self.jobs),
            dropout_keys=tuple(dropout_keys),
            portion_tokens=tuple(job.spec.portion_tokens for job in self.jobs),
            num_nano_batches=1 if switch is None else switch.count,
            cut=self._cut,
            rule=self.rule,
            cp_rates=None if self.timing is None else self.timing.cp_rates,
        )

    def _end_placeholders(self) -> list[int]:
        """Moves placeholders past completed batches; returns the slots of jobs that completed."""
        begun = [(slot, job) for slot, job in enumerate(self.jobs) if job.loss is not None]
        complete = [slot for slot, job in begun if not job.queue]
        for slot in complete:
            if not self.jobs[slot].is_active:
                self.jobs[slot].end_batch()
        return [slot for slot in complete if self.jobs[slot].is_active]

    def _add_losses(self, micro_batch: MicroBatch, losses_T: Tensor) -> None:
        """Adds a micro-batch's losses to its jobs' batches."""
        if not self.groups.counts_losses:
            return
        view = micro_batch.packed.view
        slots, lengths = zip(*view.rows.portions, strict=True)
        lengths_G = to_device(torch.tensor(lengths), losses_T.device)
        exact = view.exactness is not None
        sums_G = segment_sums(micro_batch.restore_order(losses_T), lengths_G, exact=exact)
        for index, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if not length or slot == view.num_slots:
                continue
            if (job := self.jobs[slot]).nll_T is not None:
                continue
            assert job.loss is not None, f"job {job.name} has rows but no batch"
            job.loss.add_(sums_G[index])

    def _request(self, slot: int) -> StepRequest:
        job = self.jobs[slot]
        assert job.loss is not None, f"job {job.name} steps without a batch"
        return StepRequest(slot, job.spec.optimizer, job.lr, job.updates, job.loss)

    def _report(self, job: JobState, outcome: StepOutcome, scores: Tensor | None) -> StepReport:
        lr, time_s = job.lr, job.batch_time_s
        tokens, target_tokens = job.end_batch()
        job.updates += outcome.applied
        job.nonfinite_in_a_row = 0 if outcome.applied else job.nonfinite_in_a_row + 1
        job.last_loss = outcome.loss
        found = {} if scores is None else named(scores)
        return StepReport(job, outcome, lr, tokens, target_tokens, time_s, found)
