"""Feeds step times to the nano-batch controller and logs its choices.

Every process calls it alike. Their times differ by microseconds, so the controller is told the
longest of them, and goes no higher than the fullest of their GPUs has memory for. That is one
all-reduce of three numbers, which nobody waits for: it is read when the host has waited for the
device at the end of the next step, so choices come a step late.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from tlora_megatron.config.schema import RunSpec
from tlora_megatron.model.backbone import Backbone
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.parallel.collectives import DEFAULT_MAX_BYTES, Kind
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import CutDocuments, RowCosts, cut_by_length
from tlora_megatron.parallel.overlap import LaneRoom
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.nano.controller import (
    AimdController,
    HysteresisController,
    NanoController,
    StepTime,
)
from tlora_megatron.training.nano.trace import NOTHING, NanoTrace, Resumed, TraceLine
from tlora_megatron.training.packing.packing import Round

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NanoSettings:
    """Mechanism and size of the collectives of nano-batches."""

    transport: Kind = "auto"
    """Mechanism of the tensor-parallel collectives; see `RunSpec.tensor_collectives`."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Bytes of the largest collective of a nano-batch; larger ones are sent in pieces."""

    @classmethod
    def of_run(
        cls,
        run: RunSpec,
        spec: ModelSpec,
        dtype: torch.dtype,
        micro_batch_tokens: int | None = None,
    ) -> NanoSettings:
        """Returns the settings that a run's engine is built with.

        The largest collective carries half a micro-batch plus 25 %, because cuts fall between
        documents.

        Args:
            micro_batch_tokens: budget of this process's replica; None = the run's.
        """
        row_bytes = spec.hidden_size * dtype.itemsize
        tokens = micro_batch_tokens or run.micro_batch_tokens
        max_bytes = min(tokens * row_bytes * 5 // 8, DEFAULT_MAX_BYTES)
        return cls(transport=run.tensor_collectives, max_bytes=max_bytes)


class NanoSwitch(Protocol):
    """Sets into how many nano-batches an engine cuts its micro-batches."""

    @property
    def count(self) -> int:
        """Most nano-batches of a micro-batch; stays 1 where the model cannot be cut."""

    def set_count(self, count: int) -> None:
        """Sets the count for the rounds to come; collective over the world."""

    def room(self) -> LaneRoom:
        """Returns the number of nano-batches that this process's device has memory for."""

    def close(self) -> None:
        """Releases what the collectives hold; collective over the world."""


def rank_aware_cut(spec: Backbone, jobs: Sequence[JobState]) -> CutDocuments:
    """Cuts micro-batches of the jobs so that nano-batches cost the same; see `RowCosts`.

    By length alone for a backbone whose whole shape is not known: its micro-batches run whole.
    """
    if not isinstance(spec, ModelSpec):
        return cut_by_length
    return RowCosts.of(spec, [job.spec.lora for job in jobs]).cut


class Agreement:
    """An exchange of step time and memory room under way; collective over the world."""

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

    def read(self) -> tuple[float, LaneRoom]:
        """Returns the longest time and the least room of any process.

        Waits for a copy that was started a step ago.
        """
        if self._copied is not None:
            self._copied.synchronize()
        time_s, most, spare = self._value.tolist()
        return time_s, LaneRoom(-most, -spare)


class _Measured(NamedTuple):
    """A step whose agreed time is not known yet."""

    agreement: Agreement
    line: TraceLine
    """Line of the trace, without what follows from the agreed time."""
    most: int
    """As in `StepTime`."""


class NanoRounds:
    """Chooses the number of nano-batches of the next rounds.

    Args:
        switch: the engine's; set between rounds. A number that has not run yet is tried only where
            all processes have room for it.
        trace: records the choices, on the writer; None elsewhere.
        resuming: goes on with the last choice in the trace; else begins a new trace.
    """

    def __init__(
        self,
        kind: Literal["best", "aimd"],
        switch: NanoSwitch,
        trace: NanoTrace | None,
        *,
        jobs: Sequence[JobState],
        device: torch.device,
        resuming: bool,
    ) -> None:
        self.kind = kind
        self.controller: NanoController = (
            HysteresisController() if kind == "best" else AimdController()
        )
        self._limit = self._told_limit = self.controller.limit
        self._highest = 1
        """Highest number that has run."""
        self._switch = switch
        self._trace = trace
        self._jobs = tuple(jobs)
        self._device = device
        self.steps, last = self._resumed(resuming=resuming)
        """Steps measured so far, those of the resumed run included."""
        if last is not None and last.chosen is not None:
            self.controller.resume(last.mix, last.chosen)
        self._time_s, self._tokens, self._most = 0.0, 0, 1
        """Totals of the rounds since the host last waited for the device."""
        self._pending: _Measured | None = None
        self._set_count()

    def after_round(
        self, jobs: Sequence[JobState], content: Round, round_s: float, *, has_waited: bool
    ) -> None:
        """Takes a round's time, and sets the number of nano-batches of the next.

        Args:
            has_waited: the host waited for the device at the end of the round, because some job
                stepped. Rounds without a wait are measured together with the next that has one.
        """
        self._time_s += round_s
        self._tokens += content.num_tokens
        self._most = max(self._most, content.most_documents)
        if not has_waited:
            return
        count, done = self.controller.count, self._pending
        line = TraceLine(
            step=0,
            nano_batches=count,
            time_s=self._time_s,
            tokens=self._tokens,
            phase=self.controller.phase,
            kept=0,
            jobs=len(jobs),
            mix=mix_key(jobs),
            job_steps=self._job_steps,
        )
        agreement = Agreement(self._time_s, self._switch.room(), self._device)
        self._pending = _Measured(agreement, line, self._most)
        self._time_s, self._tokens, self._most = 0.0, 0, 1
        if done is not None:
            self._take(done)
        if self.controller.count != count:
            self._set_count()

    def jobs_changed(self, jobs: Sequence[JobState]) -> None:
        """Forgets the times of rounds with other jobs; every process calls it between rounds."""
        self._jobs = tuple(jobs)
        self._pending = None
        self._time_s, self._tokens, self._most = 0.0, 0, 1

    def _set_count(self) -> None:
        count = self.controller.count
        self._highest = max(self._highest, count)
        self._switch.set_count(count)

    def _take(self, done: _Measured) -> None:
        """Tells the controller a step's time, unless its count has changed meanwhile."""
        (agreement, line, most), controller = done, self.controller
        time_s, room = agreement.read()
        self._limit_count(room, most)
        if line.nano_batches == controller.count:
            step = StepTime(time_s=time_s, tokens=line.tokens, mix_key=line.mix, most=most)
            controller.next_count(step)
        self.steps += 1
        if self._trace is not None:
            kept, chosen = controller.kept, controller.chosen(line.mix)
            found = replace(line, step=self.steps, time_s=time_s, kept=kept, chosen=chosen)
            self._trace.append(found)

    def _limit_count(self, room: LaneRoom, most_documents: int) -> None:
        """Keeps the controller from trying new numbers that may not fit into memory."""
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
        """The choice for `summary.json`, and its time over that of whole micro-batches."""
        times = getattr(self.controller, "times", {})
        kept = self.controller.kept
        ratio = times[kept] / times[1] if {1, kept} <= times.keys() else None
        return {"count": kept, "controller": self.kind, "time_over_one": ratio}

    @property
    def _job_steps(self) -> dict[str, int]:
        return {job.name: job.step for job in self._jobs}

    def _resumed(self, *, resuming: bool) -> Resumed:
        """Reads the trace on the writer and tells all processes; collective over the world."""
        found = NOTHING
        if self._trace is not None:
            if resuming:
                found = self._trace.resume(self._job_steps)
            else:
                self._trace.begin()
        told = [found]
        dist.broadcast_object_list(told, src=0)
        return told[0]


def mix_key(jobs: Sequence[JobState]) -> str:
    """Returns a short hash of the jobs in the slots, placeholders of failed ones included."""
    names = [f"{job.name}\0{job.is_active}" for job in jobs]
    return hashlib.blake2s("\n".join(names).encode(), digest_size=6).hexdigest()


def start_nano_batches(
    run: RunSpec,
    switch: NanoSwitch | None,
    groups: ParallelGroups,
    jobs: Sequence[JobState],
    *,
    resuming: bool,
    traces: bool = True,
) -> NanoRounds | None:
    """Sets the number of nano-batches that a run asks for, once the backbone has its adapters.

    Collective over the world.

    Returns:
        What chooses the number from now on; None where it stays as it is.
    """
    if switch is None or run.nano_batches == 1 or not _all_have_tp(groups):
        return None
    # Two make the engine ready for any number, or say why there can be none.
    switch.set_count(2 if run.nano_batches == "auto" else run.nano_batches)
    if run.nano_batches != "auto" or switch.count == 1:
        return None
    return NanoRounds(
        run.nano_controller,
        switch,
        NanoTrace(Path(run.output_dir)) if traces and groups.is_writer else None,
        jobs=jobs,
        device=groups.device,
        resuming=resuming,
    )


def _all_have_tp(groups: ParallelGroups) -> bool:
    """True where all ranks are in tensor-parallel groups of one size; collective over the world.

    Numbers of nano-batches are agreed over the world, and replicas of other sizes have none.
    """
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, groups.layout.tp_size)
    if len(set(sizes)) > 1 and groups.is_writer:
        logger.warning(
            "run.nano_batches has no effect, micro-batches run whole: replicas differ in tp_size"
        )
    return len(set(sizes)) == 1 and sizes[0] > 1
