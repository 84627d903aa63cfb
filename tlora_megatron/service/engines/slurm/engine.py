"""Gangs as steps of the SLURM allocation in which the service runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
        self._told: set[tuple[str, int]] = set()
        """Gangs that are over and were told of: they are read again only for a cursor."""
        self._past: dict[tuple[str, int], EventReader] = {}
        self._adopt()

    def start(self, spec: GangSpec) -> None:
        """Starts the step of a gang; a second call with the same epoch does nothing."""
        key = (spec.gang, spec.epoch)
        if key in self._gangs:
            return
        self._check(spec)
        folder = GangFolder(self._home.root, spec.gang, spec.epoch)
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
        for key, gang in self._gangs.items():
            if key in since or key not in self._told:
                events += gang.events(since.get(key, 0))
            if gang.is_over:
                self._told.add(key)
        for key in set(since) - set(self._gangs):
            events += self._past_events(key, since[key])
        return events

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes of a gang by SIGKILL; True when SLURM says that they are gone."""
        known = self._gangs.get((gang, epoch))
        return known is None or known.kill(_ASKED, self.allocation.steps)

    def gangs(self) -> Sequence[GangInfo]:
        """Gangs with processes, started here or taken up."""
        self._look()
        return tuple(
            GangInfo(gang=name, epoch=epoch, alive=not gang.is_ending)
            for (name, epoch), gang in self._gangs.items()
            if not gang.is_over
        )

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

    def _check(self, spec: GangSpec) -> None:
        nodes = self.allocation.nodes
        for node, gpu in spec.gpus:
            if not (0 <= node < len(nodes) and 0 <= gpu < nodes[node].gpus):
                counts = [found.gpus for found in nodes]
                raise ValueError(
                    f"the places of gang {spec.gang} must be on nodes with {counts} places, got "
                    f"{spec.gpus}"
                )
        if len(set(spec.gpus)) < len(spec.gpus):
            raise ValueError(f"the places of gang {spec.gang} must be different, got {spec.gpus}")

    def _adopt(self) -> None:
        """Takes up the gangs of the folder that are not over."""
        steps = _Once(self.allocation)
        for path in sorted(self._home.gangs.iterdir()):
            folder = GangFolder.at(path)
            last = EventReader(folder).last()
            kind = last.kind if last else None
            if folder.has_spec and kind != "died" and (kind != "stopped" or path.name in steps()):
                srun = folder.path / SRUN_PID
                life = Life.known_as(srun.read_text()) if srun.exists() else Life.over()
                spec = folder.spec()
                gang = SlurmGang(folder, spec, self.allocation, life)
                gang.look(steps)
                self._gangs[spec.gang, spec.epoch] = gang

    def _past_events(self, key: tuple[str, int], number: int) -> list[GangEvent]:
        if key not in self._past:
            self._past[key] = EventReader(GangFolder(self._home.root, *key))
        return self._past[key].after(number)


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
