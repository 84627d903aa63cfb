"""Processes with everything imported that wait to become ranks.

Nothing has to be installed for it.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlora_megatron.service.engines.base import GangEngine, GangHandle
from tlora_megatron.service.engines.protocol import (
    RANK_COMMAND,
    Cursor,
    NodeInfo,
    WorkerSlots,
    blame,
    inherited_environment,
    say_died,
)
from tlora_megatron.service.messages import GangEvent, GangFolder, GangSpec
from tlora_megatron.service.supervisor import Child, ProcessHandle, available_memory_bytes

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "tlora_megatron.service.worker.preforked")
_WORKER_BYTES = 3 << 29
"""Memory that must be free for each: one with a GPU's build of torch takes 0.5 GB."""


class PreforkedWorker:
    """One waiting process, which ends with this one unless it has been given an order."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.child = Child(command, environment=environment, log=log, wire="lines")
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """True once it has everything imported."""
        self._is_ready = self._is_ready or bool(self.child.pipe.receive())
        return self._is_ready

    def order(self, folder: GangFolder, rank: int, environment: Mapping[str, str]) -> bool:
        """Has it become, or fork, a rank; False if it is not there any more."""
        return self.child.pipe.send(
            {"folder": str(folder.path), "rank": rank, "env": dict(environment)}
        )


class PreforkedWorkers:
    """One worker for each of the first GPUs, or one that forks; `count` None = as memory allows."""

    def __init__(
        self,
        folder: Path,
        slots: WorkerSlots,
        environment: Mapping[str, str],
        count: int | None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._environment = environment
        self._command = tuple(command)
        wanted = slots.count if count is None else min(count, slots.count)
        if count is None:
            wanted = min(wanted, available_memory_bytes() // _WORKER_BYTES)
        self._wanted = wanted if slots.devices else min(wanted, 1)
        self.by_slot: dict[int, PreforkedWorker] = {}
        """The processes that wait, each in its slot; one that forks at 0."""

    @property
    def forks(self) -> bool:
        """True if one worker serves all slots."""
        return not self._slots.devices

    def take(self, slot: int) -> PreforkedWorker | None:
        """The worker for a rank in a slot; one that does not fork is the caller's now."""
        if self.forks:
            return self._living(0)
        worker = self._living(slot)
        return None if worker is None else self.by_slot.pop(slot)

    def replenish(self) -> None:
        """Starts what is missing, a few at a time: imports are work for every core."""
        missing = [slot for slot in range(self._wanted) if self._living(slot) is None]
        starting = sum(not worker.is_ready for worker in self.by_slot.values())
        room = max(1, len(os.sched_getaffinity(0)) // 2) - starting
        if not self._wanted:  # given up a moment ago
            return
        for slot in missing[: max(0, room)]:
            environment = {**self._environment, **self._slots.environment(slot)}
            command = [*self._command, *(["--forks"] if self.forks else [])]
            log = self._folder / f"worker_{slot}.log"
            self.by_slot[slot] = PreforkedWorker(command, environment, log)

    def close(self) -> None:
        for worker in self.by_slot.values():
            worker.child.kill()
        self.by_slot.clear()

    def _living(self, slot: int) -> PreforkedWorker | None:
        worker = self.by_slot.get(slot)
        if worker is not None and worker.child.handle.is_over:
            del self.by_slot[slot]
            if not worker.is_ready:
                self._wanted = 0  # ranks that start by themselves say what is wrong
                words = worker.child.last_words
                logger.error(
                    "gangs start without pre-forked workers, one of which failed: %s", words
                )
            worker.child.kill()
            return None
        return worker


_HALF_STARTED = "its start was broken off, since the service ended in the middle of it"
_LEAVE_S = 10.0
"""For the ranks of a gang that has stopped as asked to be gone by themselves."""
_WORD_S = 5.0
"""For a parent that is not the engine to note how its child has ended."""


@dataclass(kw_only=True, slots=True)
class Member:
    """A rank's process, or where it will come from."""

    rank: int
    handle: ProcessHandle | None = None
    """None until a process that another one forks has said who it is."""
    parent: ProcessHandle | None = None
    """Who was asked to fork it; None = nobody."""
    child: Child | None = None
    """None where it is not this process's child."""

    def exit_code(self, folder: GangFolder) -> int | None:
        """How it ended, -n by signal n; None if that is not known (yet)."""
        code = self.child.exit_code if self.child is not None else None
        return code if code is not None else folder.read_json(f"exit_{self.rank}")

    def may_tell(self) -> bool:
        """True if a process is there that will note how this one has ended."""
        return self.parent is not None and not self.parent.is_over

    @property
    def is_missing(self) -> bool:
        """True if its process runs no more, or none will come."""
        if self.handle is not None:
            return self.handle.is_ending
        return not self.may_tell()

    @property
    def is_gone(self) -> bool:
        """True if nothing is left of its process, or there is none."""
        return self.handle is None or self.handle.is_over


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    kill_at_s: float
    leaves: bool = False
    """All that are missing have ended without a fault."""
    to_blame: Sequence[Member] = ()
    """Who was missed first; of them `died` tells."""
    reason: str | None = None
    """A sentence that `died` tells instead of naming a process."""
    word_at_s: float = -math.inf
    """Until then a parent's note of how they ended is waited for."""


class LocalGang(GangHandle):
    """The processes of one start of a gang."""

    def __init__(self, folder: GangFolder, spec: GangSpec, members: Sequence[Member]) -> None:
        super().__init__(folder, spec)
        self._members = tuple(members)
        self._ending: _Ending | None = None

    @property
    def is_ending(self) -> bool:
        return self._ending is not None

    def look(self) -> None:
        if self.is_over:
            return
        self.find_forks()
        if self._ending is None or self._ending.leaves:
            self._judge()
        self._get_on()

    def kill(self, reason: str) -> None:
        if not self.is_over and (self._ending is None or self._ending.leaves):
            self._ending = _Ending(kill_at_s=-math.inf, reason=reason)
            self._get_on()

    def release(self) -> None:
        for handle in self._handles():
            handle.close()

    def _handles(self) -> list[ProcessHandle]:
        return [member.handle for member in self._members if member.handle is not None]

    def find_forks(self) -> None:
        """Takes up the processes that have said who they are."""
        for member in self._members:
            if member.handle is None and (path := self.folder.pid(member.rank)).exists():
                member.handle = ProcessHandle.known_as(path.read_text())

    def _judge(self) -> None:
        """Decides what is to happen if ranks are missing."""
        missing = [member for member in self._members if member.is_missing]
        if not missing:
            return
        now_s = time.monotonic()
        failed = [m for m in missing if m.handle is None or m.exit_code(self.folder) != 0]
        if failed:
            self._ending = _Ending(kill_at_s=now_s, to_blame=failed, word_at_s=now_s + _WORD_S)
        elif self.has_stopped and (self._ending is None or self._ending.kill_at_s == math.inf):
            self._ending = _Ending(kill_at_s=now_s + _LEAVE_S, leaves=True)
        elif self._ending is None or len(missing) == len(self._members):
            # Ended as if asked to: the others, which may still save, will say so.
            self._ending = _Ending(kill_at_s=math.inf, leaves=True, to_blame=missing)

    def _get_on(self) -> None:
        """Carries an ending as far as it goes without waiting."""
        ending = self._ending
        if ending is None:
            return
        if time.monotonic() >= ending.kill_at_s:
            if not self.folder.is_closed:
                self.folder.close()
                self.find_forks()  # one that says who it is later sees that it is too late
            for handle in self._handles():
                handle.kill()
        is_empty = all(member.is_gone for member in self._members)
        # Somebody may be about to note how the first to go has ended.
        waits = any(m.exit_code(self.folder) is None and m.may_tell() for m in ending.to_blame)
        if is_empty and (time.monotonic() >= ending.word_at_s or not waits):
            if not self.has_stopped:
                codes = {member.rank: member.exit_code(self.folder) for member in ending.to_blame}
                ordered = {"rank": 0, "reason": ending.reason}
                say_died(self.folder, blame(self.folder, codes) if codes else ordered)
            self.is_over = True
            for member in self._members:
                if member.child is not None:
                    member.child.wait()  # or its number would stay taken
            self.release()


class LocalEngine(GangEngine[LocalGang]):
    """`GangEngine` on this host, without a thread: what is due is done within `poll`.

    Args:
        gpus: GPUs to use; None = all that this process may see, 0 = none.
        slots: worker slots of a host without GPUs; None = one a core.
        preforked: workers that wait; None = one a GPU, or one that forks; 0 = none.
        rank_command, worker_command: for tests.
    """

    shares_gpus = True

    def __init__(
        self,
        root: Path | str,
        gpus: int | None = None,
        *,
        slots: int | None = None,
        preforked: int | None = None,
        rank_command: Sequence[str] = RANK_COMMAND,
        worker_command: Sequence[str] = COMMAND,
    ) -> None:
        super().__init__(root, rank_command)
        self._slots = WorkerSlots.of_host(gpus, slots)
        self._environment = inherited_environment()
        self.workers = PreforkedWorkers(
            self.home.standby, self._slots, self._environment, preforked, worker_command
        )
        """The processes that wait to become ranks."""
        self.adopt_all()
        self._replenish()

    def launch(self, folder: GangFolder, spec: GangSpec) -> LocalGang:
        members: list[Member] = []
        error: OSError | None = None
        try:
            for rank, (_, slot) in enumerate(spec.gpus):
                members.append(self._start(folder, rank, slot))
        except OSError as found:
            error = found
        gang = LocalGang(folder, spec, members)
        if error is not None:
            gang.kill(f"its processes could not be started: {error}")
        return gang

    def adopt(self, folder: GangFolder, *, has_stopped: bool) -> LocalGang | None:
        """Takes a gang up; one that is not whole is ended."""
        spec = folder.spec()
        members = [Member(rank=rank) for rank in range(spec.world_size)]
        gang = LocalGang(folder, spec, members)
        gang.find_forks()
        if any(member.handle is None for member in members):
            gang.kill(_HALF_STARTED)
        if has_stopped:
            gang.look()
            if gang.is_over:
                return None
        return gang

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor; starts workers that are missing."""
        events = super().poll(since)
        self._replenish()
        return events

    def nodes(self) -> Sequence[NodeInfo]:
        return (NodeInfo(node=0, address="127.0.0.1", gpus=self._slots.count),)

    def close(self) -> None:
        """Ends the pre-forked workers and lets go of the gangs, which go on."""
        self.workers.close()
        super().close()

    def _start(self, folder: GangFolder, rank: int, slot: int) -> Member:
        environment = self._slots.environment(slot)
        worker = self.workers.take(slot)
        if worker is not None:
            is_taken = worker.order(folder, rank, environment)
            if is_taken and self.workers.forks:
                return Member(rank=rank, parent=worker.child.handle)
            if is_taken:
                worker.child.pipe.close()
                return Member(rank=rank, handle=worker.child.handle, child=worker.child)
            if not self.workers.forks:
                worker.child.kill()
        child = Child(
            [*self.rank_command, str(folder.path), str(rank)],
            environment={**self._environment, **environment},
            log=folder.log(rank),
        )
        return Member(rank=rank, handle=child.handle, child=child)

    def _replenish(self) -> None:
        """Starts workers while no gang is starting."""
        if all(gang.has_spoken or gang.is_over for gang in self._gangs.values()):
            self.workers.replenish()
