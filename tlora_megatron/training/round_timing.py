"""How deep rounds are, and the speeds of a run's replicas as rounds show them.

A deeper round shares out better among replicas, but a job with a small batch steps once a round.
Rounds get deeper only where all jobs together gain 5 % by it, or where the smallest job loses no
more than that.

Predicted speeds of unlike replicas may be off by a few per cent. Times differ from run to run, and
bits would with them, so speeds are only corrected on demand (`run.correct_speeds`), and only where
jobs are saved: all processes agree there on a correction in coarse steps, which is kept beside the
checkpoints, so that a run that goes on shares its rounds out as it would have.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.model.cp_dispatch import CpRates
from tlora_megatron.model.dispatch import ReplicaRate, admit, predicted_ends_ps, share_out, turns
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import Round
from tlora_megatron.training.packing.portions import RoundRule, rank_ends_ps, round_ends_ps

logger = logging.getLogger(__name__)

DEPTHS = (1, 2, 4)
"""Depths that are compared."""
ENOUGH = 0.97
"""Busy share at which deeper rounds are not looked for."""
WORTH = 1.05
"""Factor of speed that is worth any loss of the smallest job, and a loss that any gain is worth."""
_SEQUENCES = 4096
"""Sequences of the rounds that are looked at, about."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 64

Batches = Callable[[int], Sequence[int]]
"""From the number of a job's batch to the rows of its sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Prediction for the rounds of a mix at one depth."""

    depth: int
    busy_share: float
    """Share of the replicas' time in which they compute, instead of waiting for the slowest."""
    smallest_speed: float
    """Rows of the job with the smallest batch for each picosecond."""


def choose_depth(jobs: Sequence[Batches], rates: Sequence[ReplicaRate]) -> list[Outlook]:
    """Compares the rounds of a mix at several depths, the chosen one last.

    Args:
        jobs: at least one.
    """
    outlooks = [outlook(jobs, rates, DEPTHS[0])]
    for depth in DEPTHS[1:]:
        before = outlooks[-1]
        if before.busy_share >= ENOUGH:
            break
        deeper = outlook(jobs, rates, depth)
        gain = deeper.busy_share / before.busy_share
        loss = before.smallest_speed / deeper.smallest_speed
        if gain <= 1.0 or (gain < WORTH and loss > WORTH):
            break
        outlooks.append(deeper)
    return outlooks


def outlook(jobs: Sequence[Batches], rates: Sequence[ReplicaRate], depth: int) -> Outlook:
    """Predicts rounds of one depth from the first batches of every job."""
    rounds = _timed_rounds(jobs, rates, depth)
    number = sequences = busy_ps = time_ps = smallest_rows = 0
    smallest = min(range(len(jobs)), key=lambda slot: sum(jobs[slot](0)))
    while number < _FEWEST_ROUNDS or (number < _MOST_ROUNDS and sequences < _SEQUENCES):
        taken = next(rounds)
        lengths = [rows for own in taken for rows in own]
        shares = [
            [[lengths[i] for i in part] for part in share] for share in share_out(lengths, rates)
        ]
        ends = predicted_ends_ps(shares, rates)
        busy_ps, time_ps = busy_ps + sum(ends), time_ps + max(ends)
        smallest_rows += sum(taken[smallest])
        sequences += sum(map(len, taken))
        number += 1
    return Outlook(
        depth=depth,
        busy_share=busy_ps / (time_ps * len(rates)),
        smallest_speed=smallest_rows / time_ps,
    )


def _timed_rounds(
    jobs: Sequence[Batches], rates: Sequence[ReplicaRate], depth: int
) -> Iterator[list[list[int]]]:
    """Yields rounds by time, without end: the rows of each slot's sequences in each of them.

    Every job's batches come one after the other.
    """
    rooms = [rate.longest for rate in rates] * depth
    left: list[list[int]] = [[] for _ in jobs]
    begun = [0] * len(jobs)
    for number in itertools.count():
        for slot, batches in enumerate(jobs):
            if not left[slot]:
                left[slot] = list(batches(begun[slot]))
                begun[slot] += 1
            left[slot] = [left[slot][i] for i in turns(left[slot], rates)]
        counts = admit(left, first_slot=number, rooms=rooms)
        yield [own[:count] for own, count in zip(left, counts, strict=True)]
        left = [own[count:] for own, count in zip(left, counts, strict=True)]


CORRECTION_FILE = "rounds.json"
"""In the output folder."""
_STEPS = 32
"""Corrections are whole numbers of this part: 3 %, more than times vary from run to run."""
_SKIPPED = 3
"""First rounds, in which kernels are loaded and memory is reserved."""


class RateCorrection:
    """Measures this process's part of the rounds, and corrects the speeds when jobs are saved.

    Args:
        rates: as predicted, one for each replica.
        frozen: the speeds stay as predicted; times are still measured.
    """

    def __init__(
        self, rates: Sequence[ReplicaRate], *, own: int, device: torch.device, frozen: bool
    ) -> None:
        self._rates = tuple(rates)
        self._kinds = list(dict.fromkeys(rates))
        self._own, self._own_kind = own, self._kinds.index(rates[own])
        self._device, self._frozen = device, frozen
        self._factors = [_STEPS] * len(self._kinds)
        self._measured_s = self._predicted_s = 0.0
        self._rounds = 0
        self._pending: list[tuple[Callable[[], float], int]] = []
        self.over_predicted: float | None = None
        """Measured over predicted time of all replicas' rounds, when jobs were saved last."""

    @property
    def rates(self) -> tuple[ReplicaRate, ...]:
        """The speeds as corrected, one for each replica."""
        factor = dict(zip(self._kinds, self._factors, strict=True))
        return tuple(_times(rate, factor[rate]) for rate in self._rates)

    @contextmanager
    def measured(self, content: Round) -> Iterator[None]:
        """Takes the time of this process's part of a round, without a wait for the device."""
        predicted_ps = round_ends_ps(content, self._rates)[self._own]
        begin = queue_moment(self._device)
        yield
        end = queue_moment(self._device)
        self._rounds += 1
        if self._rounds > _SKIPPED and predicted_ps:
            self._pending.append((partial(seconds_between, begin, end), predicted_ps))

    def settle(self) -> None:
        """Agrees on what the rounds so far say; collective over the world."""
        for seconds, predicted_ps in self._pending:
            self._measured_s += seconds()
            self._predicted_s += predicted_ps * 1e-12
        self._pending.clear()
        own = torch.zeros(2, len(self._kinds), dtype=torch.float64)
        own[:, self._own_kind] = torch.tensor([self._measured_s, self._predicted_s])
        sums = to_device(own, self._device)
        dist.all_reduce(sums)
        measured, predicted = sums.tolist()
        if not all(predicted):
            return
        self.over_predicted = sum(measured) / sum(predicted)
        if not self._frozen:
            ratios = [m / p for m, p in zip(measured, predicted, strict=True)]
            self._factors = [max(1, round(_STEPS * ratio / ratios[0])) for ratio in ratios]

    def state(self) -> str | None:
        """The corrections as JSON, by the speeds that they correct; None if there cannot be any."""
        if self._frozen or len(self._kinds) == 1:
            return None
        kinds = zip(self._kinds, self._factors, strict=True)
        return json.dumps({"factors": {_key(kind): factor for kind, factor in kinds}})

    def restore(self, text: str) -> None:
        """Takes up corrections of the same speeds; those of others are left alone."""
        kept = json.loads(text)["factors"]
        if not self._frozen:
            self._factors = [int(kept.get(_key(kind), _STEPS)) for kind in self._kinds]


def queue_moment(device: torch.device) -> Any:
    """A moment in a GPU's queue, or of the clock where there is none."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds between two moments that have passed."""
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


def read_correction(correction: RateCorrection, output_dir: Path) -> None:
    """Takes up what an earlier part of the run has kept; collective over the world."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        with suppress(OSError):
            found = [(output_dir / CORRECTION_FILE).read_text()]
    dist.broadcast_object_list(found, src=0)
    if found[0] is not None:
        correction.restore(found[0])


def write_correction(state: str, output_dir: Path) -> None:
    """Keeps the corrections; a disk that refuses costs a warning."""
    try:
        write_atomic(output_dir / CORRECTION_FILE, state, mode=BY_UMASK)
    except OSError as error:
        logger.warning("%s could not be written: %s", CORRECTION_FILE, error)


def _times(rate: ReplicaRate, factor: int) -> ReplicaRate:
    """A speed in units of the first kind's, exactly the same for a factor of 1."""
    if factor == _STEPS:
        return rate
    return replace(
        rate,
        token_ps=max(1, rate.token_ps * factor // _STEPS),
        square_ps=rate.square_ps * factor // _STEPS,
        fixed_ps=rate.fixed_ps * factor // _STEPS,
    )


def _key(rate: ReplicaRate) -> str:
    return f"{rate.token_ps} {rate.square_ps} {rate.fixed_ps} {rate.longest}"


RoundDepth = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTiming:
    """The speeds by which a run shares out its rounds."""

    rates: tuple[ReplicaRate, ...]
    """Predicted speed of each data-parallel replica."""
    stages: tuple[int, ...]
    """Pipeline stages of each replica."""
    depth: RoundDepth = 1
    """The value of `run.round_depth`."""
    is_unlike: bool = False
    """Replicas have unlike layouts: then rounds of depth 1 are shared out by time, too."""
    source: str = ""
    """The source of the speeds, for the log."""
    in_seconds: bool = True
    """The speeds are of this machine; else only their ratios mean anything."""

    cp_rates: CpRates | None = None
    """Speeds of teams of a replica's context-parallel ranks, where each micro-batch has its own;
    None = all ranks run all."""

    def ends_ps(self, filled: Round) -> list[int]:
        """Predicted time of each replica for its part of a round, or of each of its ranks."""
        if self.cp_rates is None:
            return round_ends_ps(filled, self.rates)
        return rank_ends_ps(filled, self.cp_rates)

    def rule(self, jobs: Sequence[JobState], *, speaks: bool) -> RoundRule | None:
        """Chooses the rule for the rounds of some jobs; None = balanced by tokens.

        Args:
            speaks: logs a choice.
        """
        if not jobs or (self.depth == 1 and not self.is_unlike):
            return None
        if self.depth != "auto":
            return self._of_depth(self.depth)
        if len(self.rates) == 1:
            return None  # nobody waits
        if any(job.spec.portion_tokens for job in jobs):
            # Dealt out to replicas by their own jobs: depth would slow small jobs for nothing.
            return self._of_depth(1) if self.is_unlike else None
        if max(self.stages) > 1:
            return self._of_depth(1)  # a pipeline's rounds are deep as it is
        outlooks = choose_depth([partial(_lengths, job) for job in jobs], self.rates)
        chosen, first = outlooks[-1], outlooks[0]
        if speaks:
            beside = "" if chosen is first else f"; with 1 they would be {first.busy_share:.0%}"
            logger.info(
                "run.round_depth auto: rounds of %d micro-batches a replica, in which the %d "
                "replicas are busy %.0f %% of the time by prediction (%s)%s",
                chosen.depth, len(self.rates), 100 * chosen.busy_share, self.source, beside,
            )  # fmt: skip
        return self._of_depth(chosen.depth)

    def _of_depth(self, depth: int) -> RoundRule:
        return RoundRule(rates=self.rates, depth=depth, stages=self.stages)


def _lengths(job: JobState, number: int) -> list[int]:
    """Rows of the sequences of a job's batch; behind the last one comes the first."""
    return [len(s.tokens) - 1 for s in job.batch(number % job.plan.num_steps)]


class BusyShare:
    """Adds up how long replicas compute in rounds, and how long for the slowest, by prediction."""

    def __init__(self) -> None:
        self._busy_ps = self._time_ps = 0

    def add(self, ends: Sequence[int]) -> None:
        """Counts a round, from the predicted time of each replica."""
        self._busy_ps += sum(ends)
        self._time_ps += len(ends) * max(ends)

    @property
    def share(self) -> float | None:
        """Share of the replicas' time in which they compute; None before any round."""
        return self._busy_ps / self._time_ps if self._time_ps else None
