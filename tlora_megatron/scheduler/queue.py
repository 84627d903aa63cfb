"""Jobs as policies see them, immutable values, and the queue in the orders that they ask for.

Every uploaded file has lengths of its own. Asked as they are, each pair of files would be a new
question to the planner, at milliseconds each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from tlora_megatron.planner.cost.adapter_sizes import chunked
from tlora_megatron.planner.cost.expert_adapters import adapts_experts
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import Kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as its tenant submitted it."""

    index: int
    """Position in the order of submission; breaks every tie."""
    name: str
    base: str
    """Name of the base model; only jobs of the same base model may train together."""
    kind: int
    """Number of its base model and load in `Speeds`."""
    num_gpus: int
    """Number of GPUs it asks for, and would hold if it trained alone."""
    submit_s: float
    isolated_s: float
    """Time it would train alone on `num_gpus` GPUs, known from its steps and batch."""
    isolated_tokens_per_s: float
    """Speed alone on `num_gpus` GPUs."""
    max_slowdown: float = 1.5
    """Bound on (speed alone) / (speed in a group), and on (end - start) / isolated_s."""
    priority: int = 0
    """Jobs of higher priority go first."""
    tenant: str = ""
    """Tenant whose quota it counts against."""
    due_s: float = math.inf
    """Time from which it goes before all others and nodes are reserved for it: no job starves."""
    is_open: bool = False
    """A client drives it: when it has work and when it ends is unknown, so that no bound holds for
    it, and it is assumed to slow no other job."""
    state_bytes: float = 0.0
    """Size of adapter, gradients and optimizer state, which a move must copy."""
    tokens: float = field(init=False, repr=False)
    """Its work in tokens."""
    least_tokens_per_s: float = field(init=False, repr=False)
    """The least speed in a group that its bound allows."""

    def deadline_s(self, start_s: float, end_s: float) -> float:
        """The time by which a job must end that starts now, whatever happens to it later.

        Its bound counts from its submission, if it can still be kept, or else from its start.
        """
        if self.is_open:
            return math.inf
        allowed_s = self.max_slowdown * self.isolated_s
        by_s = self.submit_s + allowed_s
        return by_s if end_s <= by_s else start_s + allowed_s

    def __post_init__(self) -> None:
        rate = self.isolated_tokens_per_s
        object.__setattr__(self, "tokens", self.isolated_s * rate)
        least = 0.0 if self.is_open else rate / self.max_slowdown
        object.__setattr__(self, "least_tokens_per_s", least)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A job that was running, and its right to come back: others on its GPUs end in time for it."""

    gpus: tuple[int, ...]
    """Those that it held."""
    back_by_s: float
    """The last time at which it may begin to move back and still end within its bound."""
    started_s: float
    """When it first trained."""
    deadline_s: float


def soonest_back_s(pauses: Iterable[Pause], gpus: Iterable[int] | None = None) -> float:
    """When the first paused job comes back to one of these GPUs, or to any; infinite if none."""
    wanted = None if gpus is None else set(gpus)
    found = (p.back_by_s for p in pauses if wanted is None or not wanted.isdisjoint(p.gpus))
    return min(found, default=math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A job that holds no GPUs."""

    job: Job
    tokens_left: float
    queued_s: float
    """When it was submitted, or when a failed node put it back into the queue."""
    pause: Pause | None = None
    """None unless a decision has paused it."""

    @property
    def isolated_left_s(self) -> float:
        """Time that its remaining work takes alone on the GPUs it asks for."""
        return self.tokens_left / self.job.isolated_tokens_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A job in a running group."""

    job: Job
    tokens_per_s: float
    tokens_left: float
    """Work that is left at the time the group is ready."""
    started_s: float
    """When it first trained, or trained again after a failure."""
    deadline_s: float
    """The time by which its bound demands that it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Jobs that train as one super-model, and the GPUs they hold; speeds are constant."""

    number: int
    members: tuple[Member, ...]
    gpus: tuple[int, ...]
    """Cluster-wide GPU numbers, ascending."""
    formed_s: float
    ready_s: float
    """When it begins to train, after the save, move and re-plan that formed it."""
    last_end_s: float = field(init=False, repr=False, compare=False)
    """When its GPUs become free if nothing changes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_end_s", max([self.end_s(m) for m in self.members]))

    @property
    def base(self) -> str:
        return self.members[0].job.base

    @property
    def kinds(self) -> Kinds:
        """The members' kinds, ascending."""
        return tuple(sorted([member.job.kind for member in self.members]))

    @property
    def tokens_per_s(self) -> float:
        return sum([member.tokens_per_s for member in self.members])

    def tokens_left(self, member: Member, now_s: float) -> float:
        """Work of a member that is left at `now_s`."""
        trained = member.tokens_per_s * max(0.0, now_s - self.ready_s)
        return max(0.0, member.tokens_left - trained)

    def end_s(self, member: Member) -> float:
        """When a member ends if nothing changes."""
        return self.ready_s + member.tokens_left / member.tokens_per_s


_Key = tuple[float, float, int]
MayRun = Callable[[Waiting], bool] | None
"""Test that leaves out jobs held back by a quota; None: no job is held back."""


class WaitingQueue:
    """The jobs that hold no GPUs. Policies only read it; the simulator adds and removes jobs."""

    def __init__(self, waiting: Iterable[Waiting] = ()) -> None:
        self._entries: dict[int, Waiting] = {}
        self._orders: dict[str, list[_Key]] = {"arrival": [], "size": [], "due": []}
        self._paused: set[int] = set()
        for entry in waiting:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, index: int) -> bool:
        return index in self._entries

    def __getitem__(self, index: int) -> Waiting:
        return self._entries[index]

    def copy(self) -> WaitingQueue:
        queue = WaitingQueue()
        queue._entries = dict(self._entries)
        queue._orders = {name: list(order) for name, order in self._orders.items()}
        queue._paused = set(self._paused)
        return queue

    def add(self, waiting: Waiting) -> None:
        index = waiting.job.index
        assert index not in self._entries, f"job {index} must not wait twice"
        self._entries[index] = waiting
        if waiting.pause is not None:
            self._paused.add(index)
        for name, key in _KEYS.items():
            insort(self._orders[name], key(waiting))

    def remove(self, index: int) -> Waiting:
        waiting = self._entries.pop(index)
        self._paused.discard(index)
        for name, key in _KEYS.items():
            order = self._orders[name]
            place = bisect_left(order, key(waiting))
            assert order[place][2] == index, "orders must hold every waiting job"
            del order[place]
        return waiting

    def paused(self) -> list[Waiting]:
        """The jobs that were running and are to come back, in order of submission."""
        return [self._entries[index] for index in sorted(self._paused)]

    def needed_s(self, gpus: Iterable[int] | None = None, without: Collection[int] = ()) -> float:
        """When a paused job comes back to one of these GPUs, or to any; infinite if none."""
        pauses = (self._entries[index].pause for index in self._paused if index not in without)
        return soonest_back_s(filter(None, pauses), gpus)

    def by_arrival(self, limit: int, may_run: MayRun = None) -> list[Waiting]:
        """The first `limit` jobs that may run, by priority, then submission."""
        return self._first("arrival", limit, may_run)

    def by_size(self, limit: int, may_run: MayRun = None) -> list[Waiting]:
        """The first `limit` jobs that may run, by priority, then remaining time alone."""
        return self._first("size", limit, may_run)

    def overdue(self, now_s: float, limit: int, may_run: MayRun = None) -> list[Waiting]:
        """The first `limit` jobs that may run and are overdue at `now_s`, longest overdue first."""
        order = self._orders["due"]
        if not order or order[0][0] > now_s:
            return []
        return [e for e in self._first("due", limit, may_run) if e.job.due_s <= now_s]

    def _first(self, order: str, limit: int, may_run: MayRun) -> list[Waiting]:
        entries, keys = self._entries, self._orders[order]
        if may_run is None:
            return [entries[key[2]] for key in keys[:limit]]
        return list(islice(filter(may_run, (entries[key[2]] for key in keys)), limit))


_KEYS: dict[str, Callable[[Waiting], _Key]] = {
    "arrival": lambda w: (-w.job.priority, w.job.submit_s, w.job.index),
    # Of a driven job the client waits.
    "size": lambda w: (
        -w.job.priority,
        0.0 if w.job.is_open else w.isolated_left_s,
        w.job.index,
    ),
    "due": lambda w: (w.job.due_s, w.job.submit_s, w.job.index),
}


_NUM_QUANTILES = 8
_LENGTHS_PER_OCTAVE = 4
_BATCHES_PER_OCTAVE = 2
ANY_DROPOUT = 0.1
"""Every dropout rate costs the same."""
_SHARE_STEPS = 8
_ROUNDING = 1e-9


def coarse_load(load: JobLoad) -> JobLoad:
    """The load as a scheduler asks about it; at least as large as the job in what memory holds.

    The rank is rounded up to 16s (a block-diagonal one as it is, that on routed experts to a power
    of 2: there kernels pad nothing, and memory is large), the batch to a power of sqrt 2, lengths
    to 8 quantiles on a grid of 4 an octave, the share of targets up to eighths.
    """
    expert_rank = None
    if adapts_experts(load):
        expert_rank = 1 << ((load.expert_rank or load.rank) - 1).bit_length()
    return replace(
        load,
        name="job",
        rank=chunked(load.rank) if load.num_blocks == 1 else load.rank,
        expert_rank=expert_rank,
        batch_size=_on_grid(load.batch_size, _BATCHES_PER_OCTAVE),
        lengths=coarse_lengths(load.lengths),
        dropout=ANY_DROPOUT if load.dropout else 0.0,
        target_share=math.ceil(load.target_share * _SHARE_STEPS) / _SHARE_STEPS,
        longest_eval=load.longest_eval and _on_grid(load.longest_eval, up=True),
    )


def coarse_lengths(lengths: LengthHistogram) -> LengthHistogram:
    """Eight equally likely lengths on a geometric grid; the longest is never rounded down."""
    ends = list(accumulate(share for _, share in lengths.pairs))
    means = [_mean_between(lengths, ends, i) for i in range(_NUM_QUANTILES)]
    rounded = [_on_grid(mean) for mean in means]
    rounded[-1] = _on_grid(lengths.longest, up=True)
    return LengthHistogram.from_counts((length, 1.0) for length in rounded)


def _mean_between(lengths: LengthHistogram, ends: Sequence[float], quantile: int) -> float:
    """Mean length of one of `_NUM_QUANTILES` equal parts of the sequences."""
    begin, end = quantile / _NUM_QUANTILES, (quantile + 1) / _NUM_QUANTILES
    total, place, at = 0.0, min(bisect_left(ends, begin), len(ends) - 1), begin
    while at < end and place < len(ends):
        upto = end if place == len(ends) - 1 else min(end, ends[place])
        total += lengths.pairs[place][0] * max(0.0, upto - at)
        at, place = max(at, upto), place + 1
    return max(1.0, total * _NUM_QUANTILES)


def _on_grid(value: float, per_octave: int = _LENGTHS_PER_OCTAVE, *, up: bool = False) -> int:
    """The nearest power of `2 ** (1 / per_octave)`, or the next one up, as a whole number."""
    exponent = math.log2(max(1.0, value)) * per_octave
    whole = math.ceil(exponent - _ROUNDING) if up else round(exponent)
    near = 2 ** (whole / per_octave)
    return math.ceil(near - _ROUNDING) if up else round(near)
