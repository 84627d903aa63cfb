"""Feeds a run's round times to the controller of nano-batches, and writes down what it chose.

Every process calls it alike. What they time differs by microseconds, so the controller is told the
longest of their times, and goes no higher than the fullest of their GPUs has memory for. That is
one all-reduce of three numbers, which nobody waits for: it is read when the host has waited for the
device at the end of the next step, so choices come a step late.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing.host_copy import to_device
from tlora_megatron.ops.routing.segments import Document
from tlora_megatron.parallel.nano.balance import RowCosts
from tlora_megatron.parallel.nano.lane_room import NO_LIMIT, LaneRoom
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.nano.aimd import AimdCount
from tlora_megatron.training.nano.controller import BestCount, NanoController, StepTime
from tlora_megatron.training.nano.trace import NOTHING, NanoTrace, Resumed, TraceLine
from tlora_megatron.training.packing.packing import Bins
from tlora_megatron.training.super_model import SuperModel

logger = logging.getLogger(__name__)


class _Settings(Protocol):
    kind: Any
    """Of the collectives; see `RunSpec.tensor_collectives`."""
    max_bytes: int
    """That they carry at once."""

    def room(self) -> LaneRoom:
        """How many nano-batches this process's device has memory for."""

    def close(self) -> None:
        """Gives back what collectives hold; collective."""


@runtime_checkable
class NanoEngine(Protocol):
    """An engine that runs micro-batches in nano-batches."""

    nano_batches: _Settings

    @property
    def num_nano_batches(self) -> int:
        """Into how many a micro-batch is to be cut, at most; 1 where the model cannot be."""

    def set_nano_batches(self, count: int) -> None:
        """Cuts the micro-batches of the next rounds into at most so many; between rounds."""


class RankAwareCut:
    """Cuts a super-model's micro-batches so that nano-batches cost the same; see `RowCosts`."""

    def __init__(self, spec: ModelSpec, super_model: SuperModel) -> None:
        self._spec = spec
        self._super_model = super_model
        self._jobs: Sequence[JobState] | None = None
        self._costs: RowCosts | None = None

    def __call__(self, documents: Sequence[Document], num_parts: int) -> tuple[int, ...]:
        """As `parallel.nano.cuts.CutDocuments`."""
        jobs = self._super_model.jobs
        if self._costs is None or jobs is not self._jobs:
            self._jobs = jobs
            self._costs = RowCosts.of(self._spec, [job.spec.lora for job in jobs])
        return self._costs.cut(documents, num_parts)


class Agreed(NamedTuple):
    """What holds for all processes together."""

    time_s: float
    """The longest."""
    room: LaneRoom
    """The least."""


class Agreement:
    """Of all processes on a step, under way. Collective over the world."""

    def __init__(self, time_s: float, room: LaneRoom, device: torch.device) -> None:
        own = [time_s, -room.most, -room.spare_bytes]
        value = to_device(torch.tensor(own, dtype=torch.float64), device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        self._value = value
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._value = torch.empty(len(own), dtype=torch.float64, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Agreed:
        """Waits until the device has come by, which it has long since."""
        if self._copied is not None:
            self._copied.synchronize()
        time_s, most, spare = self._value.tolist()
        return Agreed(time_s, LaneRoom(-most, -spare))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """A step whose time is under way."""

    agreement: Agreement
    tokens: int
    mix_key: str
    most: int
    num_jobs: int
    job_steps: dict[str, int]
    """Of each of the run's jobs."""
    count: int
    phase: str


class NanoRounds:
    """Chooses the number of nano-batches of the next rounds.

    Args:
        set_count: makes the engine cut so; called between rounds.
        jobs: all of the run's, at the steps that they go on from.
        output_dir: where the trace goes on the writer.
        resuming: goes on with what the trace there says was chosen last; else begins a new one.
        room: what this process's device has memory for; a number that has not run yet is tried only
            where all processes have.
    """

    def __init__(
        self,
        kind: Literal["best", "aimd"],
        set_count: Callable[[int], None],
        *,
        jobs: Sequence[JobState],
        device: torch.device,
        output_dir: Path,
        is_writer: bool,
        resuming: bool,
        room: Callable[[], LaneRoom] = lambda: NO_LIMIT,
    ) -> None:
        self.kind = kind
        self.controller: NanoController = BestCount() if kind == "best" else AimdCount()
        self._limit = self._told_limit = self.controller.limit
        self._highest = 1
        """That has run."""
        self._set_engine = set_count
        self._room = room
        self._jobs = tuple(jobs)
        self._device = device
        self._trace = NanoTrace(output_dir) if is_writer else None
        self.steps, last = self._resumed(resuming=resuming)
        """Measured so far, those of the resumed run included."""
        if last is not None and last.chosen is not None:
            self.controller.resume(last.mix, last.chosen)
        self._time_s, self._tokens, self._most = 0.0, 0, 1
        """Of the rounds since the host last waited for the device."""
        self._pending: _Measured | None = None
        self._set_count()

    def after_round(
        self, jobs: Sequence[JobState], bins: Bins, round_s: float, *, has_waited: bool
    ) -> None:
        """Takes a round's time, and sets the count of the next.

        Args:
            jobs: that the round was packed of, in slot order.
            bins: what it held.
            has_waited: whether the host waited for the device at its end: some job stepped. Rounds
                before are measured together with the one that does.
        """
        self._time_s += round_s
        self._tokens += bins.num_tokens
        self._most = max(self._most, bins.most_documents)
        if not has_waited:
            return
        count, done = self.controller.count, self._pending
        self._pending = _Measured(
            agreement=Agreement(self._time_s, self._room(), self._device),
            tokens=self._tokens,
            mix_key=mix_key(jobs),
            most=self._most,
            num_jobs=len(jobs),
            job_steps=self._job_steps,
            count=count,
            phase=self.controller.phase,
        )
        self._time_s, self._tokens, self._most = 0.0, 0, 1
        if done is not None:
            self._take(done)
        if self.controller.count != count:
            self._set_count()

    def _set_count(self) -> None:
        count = self.controller.count
        self._highest = max(self._highest, count)
        self._set_engine(count)

    def _take(self, done: _Measured) -> None:
        """Tells the controller of a step, unless it has gone on to another count meanwhile."""
        agreed = done.agreement.read()
        self._limit_count(agreed.room, done.most)
        step = StepTime(
            time_s=agreed.time_s, tokens=done.tokens, mix_key=done.mix_key, most=done.most
        )
        if done.count == self.controller.count:
            self.controller.next_count(step)
        self._write(step, done)

    def _limit_count(self, room: LaneRoom, most_documents: int) -> None:
        """Keeps the controller from numbers that have not run yet and may not fit."""
        limit = min(self._limit, max(self._highest, room.most))
        self.controller.limit = int(limit)
        if limit < min(self._told_limit, most_documents):
            self._told_limit = int(limit)
            if self._trace is not None:
                logger.warning(
                    "run.nano_batches: more than %d are not tried: the fullest GPU has %.1f GiB "
                    "left beside its peak", limit, room.spare_bytes / 2**30,
                )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """For `summary.json`: what was chosen, and its time over that of no splitting."""
        times = getattr(self.controller, "times", {})
        kept = self.controller.kept
        ratio = times[kept] / times[1] if {1, kept} <= times.keys() else None
        return {"count": kept, "controller": self.kind, "time_over_one": ratio}

    @property
    def _job_steps(self) -> dict[str, int]:
        return {job.name: job.step for job in self._jobs}

    def _resumed(self, *, resuming: bool) -> Resumed:
        """What the trace says, the same on all processes."""
        found = NOTHING
        if self._trace is not None:
            if resuming:
                found = self._trace.resume(self._job_steps)
            else:
                self._trace.begin()
        told = [found]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def _write(self, step: StepTime, done: _Measured) -> None:
        self.steps += 1
        if self._trace is None:
            return
        line = TraceLine(
            step=self.steps,
            nano_batches=done.count,
            time_s=step.time_s,
            tokens=step.tokens,
            phase=done.phase,
            kept=self.controller.kept,
            jobs=done.num_jobs,
            mix=step.mix_key,
            chosen=self.controller.chosen(step.mix_key),
            job_steps=done.job_steps,
        )
        self._trace.append(line)


def mix_key(jobs: Sequence[JobState]) -> str:
    """Short name of who trains beside whom; what has failed but keeps its seat counts too."""
    names = [f"{job.name}\0{job.is_active}" for job in jobs]
    return hashlib.blake2s("\n".join(names).encode(), digest_size=6).hexdigest()
