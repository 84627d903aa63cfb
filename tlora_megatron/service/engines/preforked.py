"""Processes with everything imported that wait to become ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlora_megatron.service.engines.protocol import WorkerSlots
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.supervisor import Child, available_memory_bytes

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
    """One worker for each of the first GPUs; on a host without any, one that forks.

    Args:
        count: None = as many as there are slots and memory for; 0 = none.
    """

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
            self.by_slot[slot] = PreforkedWorker(command, environment, self._log(slot))

    def close(self) -> None:
        """Ends all that wait."""
        for worker in self.by_slot.values():
            worker.child.kill()
        self.by_slot.clear()

    def _log(self, slot: int) -> Path:
        return self._folder / f"worker_{slot}.log"

    def _give_up(self, worker: PreforkedWorker) -> None:
        """Starts no more of them: ranks that start by themselves say what is wrong."""
        self._wanted = 0
        words = worker.child.last_words
        logger.error("gangs start without pre-forked workers, one of which failed: %s", words)

    def _living(self, slot: int) -> PreforkedWorker | None:
        worker = self.by_slot.get(slot)
        if worker is not None and worker.child.handle.is_over:
            del self.by_slot[slot]
            if not worker.is_ready:
                self._give_up(worker)
            worker.child.kill()
            return None
        return worker
