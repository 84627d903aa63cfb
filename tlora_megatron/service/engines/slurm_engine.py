"""Gangs as steps of the SLURM allocation in which the service runs."""

from __future__ import annotations

import logging
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora_megatron.append_log import LineReader
from tlora_megatron.service.engines.base import FolderEngine, GangHandle
from tlora_megatron.service.engines.protocol import (
    HOST_VARIABLE,
    RANK_COMMAND,
    NodeInfo,
    blame,
    say_died,
)
from tlora_megatron.service.engines.slurm_allocation import TASK, Allocation
from tlora_megatron.service.messages import GangFolder, GangSpec
from tlora_megatron.service.supervisor import Child, ProcessHandle, identity_of, last_words

logger = logging.getLogger(__name__)

_SRUN_LOG, _SRUN_PID = "srun.log", "srun.pid"
_LEAVE_S = 10
"""From the end of a gang's first process to the last one's, where none has failed."""
_LOOK_S = 0.2
"""Between two questions whether a step that was killed is gone."""
_WATCH_S = 1.0
"""Between two questions whether a step lives of which no srun tells."""
_COMPLAINT = re.compile(r"tasks? (?P<tasks>[\d,\-\[\]]+): (?P<how>.+)")
_EXIT = re.compile(r"Exited with exit code (\d+)")
_CODES: Mapping[str, int] = {
    text: -number for number in signal.valid_signals() if (text := signal.strsignal(number))
}


class SlurmGang(GangHandle):
    """The step of one start of a gang; `srun` is over, `child` None if another host started it."""

    def __init__(
        self,
        folder: GangFolder,
        spec: GangSpec,
        allocation: Allocation,
        srun: ProcessHandle,
        child: Child | None = None,
    ) -> None:
        super().__init__(folder, spec)
        self._allocation = allocation
        self._srun = srun
        self._child = child
        self._said = LineReader(folder.path / _SRUN_LOG)
        self._asked_s = -math.inf

    def look(self) -> None:
        """Ends the gang if one of its processes has ended; asks SLURM where nothing else tells."""
        if self.is_over:
            return
        if self.died is None:
            try:
                self._notice()
            except RuntimeError as error:
                logger.warning("%s", error)
        if self.died is not None and self._is_due(_LOOK_S):
            self._end()

    def kill(self, reason: str) -> None:
        if not self.is_over:
            self.died = self.died or {"rank": 0, "reason": reason}
            self._allocation.forget_steps()  # an older answer would prove nothing
            self._end()

    def release(self) -> None:
        self._srun.close()

    def _notice(self) -> None:
        codes = complaints(self._said.read())
        if codes:
            self.died = blame(self.folder, codes)
        elif self._srun.is_over and self._is_due(_WATCH_S):
            if self.folder.path.name not in self._allocation.steps():
                self.died = self._silent_end()
            elif any(self.folder.path.glob("e*_*")):  # exit_K, end_K.json
                self.died = blame(self.folder, dict.fromkeys(range(self.spec.world_size)))

    def _silent_end(self) -> dict[str, Any]:
        """The body of `died` for a step of which srun had nothing to say."""
        if any(self.folder.pid(rank).exists() for rank in range(self.spec.world_size)):
            return blame(self.folder, dict.fromkeys(range(self.spec.world_size)))
        said = last_words(self.folder.path / _SRUN_LOG)
        how = f"srun said: {said}" if said else "and srun said nothing"
        return {"rank": 0, "reason": f"SLURM has not started the gang, {how}"}

    def _end(self) -> None:
        """Carries the ending on: no srun, no step, then the last event."""
        if not self.folder.is_closed:
            self.folder.close()
        self._srun.kill()
        try:
            step = self._allocation.steps().get(self.folder.path.name)
        except RuntimeError:
            return  # without an answer there is no proof
        if step is not None:
            self._allocation.kill_step(step)
        elif self._srun.is_over:
            assert self.died is not None, "only a gang that is ending is ended"
            say_died(self.folder, self.died)
            self.is_over = True
            self.release()
            if self._child is not None:
                self._child.wait()

    def _is_due(self, pause_s: float) -> bool:
        now_s = time.monotonic()
        if now_s < self._asked_s + pause_s:
            return False
        self._asked_s = now_s
        return True


def complaints(lines: list[str]) -> dict[int, int]:
    """Rank -> exit code, -n by signal n, of failed tasks; srun's own SIGTERM counts last."""
    codes: dict[int, int] = {}
    for line in lines:
        if (match := _COMPLAINT.search(line)) is None:
            continue
        found = _EXIT.match(match["how"])
        code = int(found[1]) if found else _CODES.get(match["how"].removesuffix(" (core dumped)"))
        if code is not None:
            codes |= dict.fromkeys(_numbers(match["tasks"]), code)
    real = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return real or codes


def _numbers(text: str) -> list[int]:
    """The numbers of `3`, `0-2,5` or `[0-2]`."""
    ends = (part.partition("-") for part in text.strip("[]").split(","))
    return [n for begin, _, end in ends for n in range(int(begin), int(end or begin) + 1)]


class SlurmEngine(FolderEngine[SlurmGang]):
    """`GangEngine` inside one allocation; every gang is a step that outlives who has started it.

    Which GPU a rank takes is the service's choice, not SLURM's. All nodes must see the folder.

    Args:
        gpus: GPUs to use on each node, or places on nodes without any; None = all.
        rank_command: for tests.
    """

    kill_s = 10.0  # SLURM's programs take tenths of a second each, and ask over a network

    def __init__(
        self,
        root: Path | str,
        gpus: int | None = None,
        *,
        rank_command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        super().__init__(root, rank_command)
        self.allocation = Allocation.open(gpus)
        """The nodes, and what SLURM is asked about them."""
        self.adopt_all()

    def adopt(self, folder: GangFolder, *, has_stopped: bool) -> SlurmGang | None:
        """Takes up a gang that an earlier engine has started in the allocation."""
        if has_stopped and folder.path.name not in self.allocation.steps():
            return None
        pid = folder.path / _SRUN_PID
        srun = ProcessHandle.known_as(pid.read_text()) if pid.exists() else ProcessHandle.over()
        gang = SlurmGang(folder, folder.spec(), self.allocation, srun)
        gang.look()
        return gang

    def nodes(self) -> Sequence[NodeInfo]:
        return self.allocation.nodes_now()

    def look(self) -> None:
        """Sees deaths and acts on them; all gangs share one answer of SLURM's."""
        self.allocation.forget_steps()
        super().look()

    def launch(self, folder: GangFolder, spec: GangSpec) -> SlurmGang:
        """Starts the srun of a gang, in a session of its own."""
        hosts = [self.allocation.names[node] for node, _ in spec.gpus]
        folder.write("hosts", "".join(f"{host}\n" for host in hosts))
        path = str(folder.path).replace("%", "%%")
        words = self.allocation.step_words(
            len(set(hosts)),
            [
                *(f"--ntasks={len(hosts)}", f"--nodelist={folder.path}/hosts"),
                *("--distribution=arbitrary", f"--job-name={folder.path.name}"),
                *("--kill-on-bad-exit=1", f"--wait={_LEAVE_S}", f"--output={path}/rank_%t.log"),
            ],
        )
        environment = self.allocation.environment()
        if len(set(hosts)) > 1:
            environment[HOST_VARIABLE] = self.allocation.nodes[spec.gpus[0][0]].address
        task = [*TASK, str(folder.path), str(self.allocation.slots or 0), *self.rank_command]
        log = folder.path / _SRUN_LOG
        child = Child([*words, *task], environment=environment, log=log, umask=0o077)
        folder.write(_SRUN_PID, f"{identity_of(child.pid)}")
        return SlurmGang(folder, spec, self.allocation, child.handle, child)
