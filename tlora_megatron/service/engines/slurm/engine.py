"""Gangs as steps of the SLURM allocation in which the service runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlora_megatron.service.engines.past import PastGangs, gang_folders
from tlora_megatron.service.engines.present import check_places, infos
from tlora_megatron.service.engines.protocol import Cursor, GangInfo, NodeInfo
from tlora_megatron.service.engines.rank_process import HOST_VARIABLE, RANK_COMMAND
from tlora_megatron.service.engines.slurm.allocation import TASK, Allocation
from tlora_megatron.service.engines.slurm.gang import SRUN_LOG, SRUN_PID, SlurmGang
from tlora_megatron.service.home import Home
from tlora_megatron.service.mail.folder import EventReader, GangFolder
from tlora_megatron.service.messages import Command, GangEvent, GangSpec
from tlora_megatron.service.processes import Life, identity_of

_ASKED = "the service has ended it"
_LEAVE_S = 10
"""From the end of a gang's first process to the last one's, where none has failed."""


class SlurmEngine:
    """`GangEngine` inside one allocation; every gang is a step that outlives who has started it.

    Steps share the nodes: which GPU a rank takes is the service's choice, not SLURM's. All nodes
    must see the service's folder. Gangs that an earlier engine has started in the allocation are
    taken up; of others `died` is among the events.

    Args:
        root: the service's folder.
        gpus: GPUs to use on each node, or places on nodes without any; None = all.
        seats: places for processes on nodes without GPUs; None = one a core.
        rank_command: for tests.
    """

    shares_gpus = False

    def __init__(
        self,
        root: Path | str,
        gpus: int | None = None,
        *,
        seats: int | None = None,
        rank_command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        self._home = Home.open(root)
        self._rank_command = tuple(rank_command)
        self.allocation = Allocation.open(gpus, seats)
        """The nodes, and what SLURM is asked about them."""
        self._gangs: dict[tuple[str, int], SlurmGang] = {}
        """Those that are not over, and those that are and were not told of since."""
        self._past = PastGangs(self._home.root)
        self._adopt()

    def start(self, spec: GangSpec) -> None:
        """Starts the step of a gang; a second call with the same epoch does nothing."""
        key = (spec.gang, spec.epoch)
        folder = GangFolder(self._home.root, spec.gang, spec.epoch)
        if key in self._gangs or folder.has_spec:
            return
        check_places(spec, [node.gpus for node in self.allocation.nodes])
        folder.create(spec)
        process = self._run(folder, spec)
        folder.write(SRUN_PID, f"{identity_of(process.pid)}")
        life = Life.of(process.pid)
        assert life is not None, "a child that nobody has waited for has a life"
        self._gangs[key] = SlurmGang(folder, spec, self.allocation, life, process)

    def post(self, command: Command) -> None:
        """Leaves a command in a gang's folder; one for a gang that is over is dropped."""
        gang = self._gangs.get((command.gang, command.epoch))
        if gang is not None:
            gang.post(command)

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor; deaths are seen and acted on here, so call it often.

        A death costs a few questions to SLURM, tenths of a second; otherwise it asks nothing.
        """
        events: list[GangEvent] = []
        self._look()
        events += self._past.events(since, self._gangs)
        for key, gang in list(self._gangs.items()):
            events += gang.events(since.get(key, 0))
            if gang.is_over:
                del self._gangs[key]
        self._past.sweep(self._gangs)
        return events

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes of a gang by SIGKILL; True when SLURM says that they are gone."""
        known = self._gangs.get((gang, epoch))
        return known is None or known.kill(_ASKED, self.allocation.steps)

    def gangs(self) -> Sequence[GangInfo]:
        """Gangs with processes, started here or taken up."""
        self._look()
        return infos(self._gangs)

    def nodes(self) -> Sequence[NodeInfo]:
        """The allocation's nodes."""
        return self.allocation.nodes_now()

    def close(self) -> None:
        """Lets go of the gangs, which go on."""
        for gang in self._gangs.values():
            gang.release()
        self._gangs.clear()

    def _look(self) -> None:
        steps = _Once(self.allocation)
        for gang in self._gangs.values():
            gang.look(steps)

    def _run(self, folder: GangFolder, spec: GangSpec) -> subprocess.Popen[bytes]:
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
        task = [*TASK, str(folder.path), str(self.allocation.seats or 0), *self._rank_command]
        log = folder.path / SRUN_LOG
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as said:
            return subprocess.Popen(
                [*words, *task],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                umask=0o077,
            )

    def _adopt(self) -> None:
        """Takes up the gangs of the folder that are not over."""
        steps = _Once(self.allocation)
        for folder in gang_folders(self._home):
            last = EventReader(folder).last()
            kind, name = last.kind if last else None, folder.path.name
            if folder.has_spec and kind != "died" and (kind != "stopped" or name in steps()):
                srun = folder.path / SRUN_PID
                life = Life.known_as(srun.read_text()) if srun.exists() else Life.over()
                spec = folder.spec()
                gang = SlurmGang(folder, spec, self.allocation, life)
                gang.look(steps)
                self._gangs[spec.gang, spec.epoch] = gang
        self._past.remove_old(self._gangs)


class _Once:
    """SLURM's steps, asked for once for all gangs of one look."""

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self._steps: Mapping[str, str] | None = None
        self._asked_s = 0.0

    def __call__(self) -> Mapping[str, str]:
        if self._steps is None or time.monotonic() > self._asked_s + 0.05:
            self._steps, self._asked_s = self._allocation.steps(), time.monotonic()
        return self._steps
