"""An engine whose gangs only pretend: they train at the planner's speeds, on a clock of their own.

For replays and tests. A controller cannot tell its gangs from processes: they keep commands in
order, drop what they have carried out, write checkpoints and adapters under their leases, and can
be told to die, to hang, to run out of memory or to be slow. What a job has learnt is a chain of
digests, one link a step, so that a step that was lost or taken twice shows in its adapter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

from tests.helpers.fake_gang import FakeGang, FakeTimes, FakeWork
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.service.engines.protocol import Cursor, GangInfo, NodeInfo
from tlora_megatron.service.messages import Command, GangEvent, GangSpec

_SLOWEST = 0.2
"""Least factor that noise may give."""
_Key = tuple[str, int]


class FakeEngine:
    """An engine of fake gangs; whatever should have happened by now has, in every call."""

    def __init__(
        self,
        *,
        nodes: Sequence[NodeInfo],
        speeds: Speeds,
        work: Callable[[Mapping[str, Any]], FakeWork],
        clock: Callable[[], float],
        times: FakeTimes | None = None,
        writes: bool = True,
        seed: int = 0,
    ) -> None:
        """Makes an engine without gangs.

        Args:
            nodes: its machines; the list `machines` may be changed later.
            speeds: speeds of groups of kinds.
            work: reads what a job is from the body of its `prepare`.
            clock: the time, Unix seconds.
            times: how long what takes.
            writes: write checkpoints and adapters into jobs' folders; else keep steps in `disk`.
            seed: of the noise.
        """
        self.machines = list(nodes)
        self.shares_gpus = False
        self.times = times or FakeTimes()
        self.writes = writes
        self.lost: str | None = None
        """Why the engine cannot be reached; None: it can."""
        self.disk: dict[str, int] = {}
        """Steps in the newest checkpoint of each job, if folders are not written."""
        self.doubled: list[str] = []
        """Jobs that two gangs trained at once: there must be none."""
        self.hungry: set[str] = set()
        """Jobs that take all memory in their first round beside others."""
        self.scores: dict[str, float] = {}
        """The `eval_loss` of trials at rungs, by name; None of others."""
        self.all_gangs: dict[_Key, FakeGang] = {}
        self._speeds = speeds
        self._work = work
        self._clock = clock
        self._random = Random(seed)
        self._agenda: list[tuple[float, int, FakeGang, Callable[[], None]]] = []
        self._count = 0
        self._now = clock()
        self._owners: dict[str, FakeGang] = {}

    # The six calls

    def start(self, spec: GangSpec) -> None:
        self._catch_up()
        key = (spec.gang, spec.epoch)
        if key not in self.all_gangs:
            factor = max(_SLOWEST, self._random.gauss(1.0, self.times.noise))
            self.all_gangs[key] = FakeGang(spec, self, factor=factor)

    def post(self, command: Command) -> None:
        self._catch_up()
        gang = self.all_gangs.get((command.gang, command.epoch))
        if gang is not None and gang.alive:
            gang.post(command)

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor, in order within each gang."""
        self._catch_up()
        found: list[GangEvent] = []
        for key, number in since.items():
            gang = self.all_gangs.get(key)
            if gang is not None and len(gang.events) > number:
                found += gang.events[number:]
        return found

    def kill(self, gang: str, epoch: int) -> bool:
        self._catch_up()
        found = self.all_gangs.get((gang, epoch))
        if found is not None and found.alive:
            found.die("killed by signal 9")
        return True

    def gangs(self) -> Sequence[GangInfo]:
        """Gangs that live, and those whose death nobody can have read."""
        self._catch_up()
        return [
            GangInfo(gang=name, epoch=epoch, alive=gang.alive)
            for (name, epoch), gang in self.all_gangs.items()
        ]

    def nodes(self) -> Sequence[NodeInfo]:
        self._catch_up()
        return tuple(self.machines)

    # Time

    def next_s(self) -> float:
        return self._agenda[0][0] if self._agenda else float("inf")

    def _catch_up(self) -> None:
        if self.lost is not None:
            raise RuntimeError(self.lost)
        until = self._clock()
        while self._agenda and self._agenda[0][0] <= until:
            at, _, gang, what = heapq.heappop(self._agenda)
            self._now = max(self._now, at)
            if gang.alive and not gang.hangs:
                what()
        self._now = max(self._now, until)

    # What gangs need

    def now(self) -> float:
        return self._now

    def later(self, seconds: float, gang: FakeGang, what: Callable[[], None]) -> None:
        """Does something after some time, if the gang still lives and does not hang."""
        self._count += 1
        heapq.heappush(self._agenda, (self._now + seconds, self._count, gang, what))

    def read(self, order: Mapping[str, Any]) -> FakeWork:
        return self._work(order)

    def rates(self, kinds: Collection[int], num_gpus: int) -> Mapping[int, float] | None:
        """Tokens per second of each kind in a group."""
        rates = self._speeds.rates(tuple(sorted(kinds)), num_gpus)
        return None if rates is None else rates.by_kind

    def trains(self, job: str, gang: FakeGang | None) -> None:
        """Notes which gang trains a job from now on."""
        if gang is None:
            self._owners.pop(job, None)
        elif self._owners.setdefault(job, gang) is not gang:
            self.doubled.append(job)
