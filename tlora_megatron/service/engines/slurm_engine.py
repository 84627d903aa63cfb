"""Gangs as steps of the SLURM allocation in which the service runs, by SLURM's own programs."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tlora_megatron.append_log import LineReader
from tlora_megatron.service.engines.base import GangEngine, GangHandle
from tlora_megatron.service.engines.protocol import (
    HOST_VARIABLE,
    RANK_COMMAND,
    NodeInfo,
    blame,
    inherited_environment,
    say_died,
)
from tlora_megatron.service.messages import GangFolder, GangSpec
from tlora_megatron.service.supervisor import Child, ProcessHandle, identity_of, last_words

logger = logging.getLogger(__name__)

_TASK = (sys.executable, "-m", "tlora_megatron.service.engines.slurm_task")
_ANSWER_S = 30.0
"""For SLURM's controller to answer: on a big cluster it takes seconds when many ask."""
_HEALTH_S = 10.0
"""Between two questions for the nodes' health."""
_STEPS_S = 0.05
"""For which an answer about steps serves all gangs that are looked at."""
_KEPT = ("SLURM_CONF", "SLURM_JWT")
"""Variables by which SLURM's programs find the cluster; others would change a step's wishes."""
_SICK = re.compile(r"down|drain|drng|fail|boot|maint|unk|inval|\*")


@dataclass(kw_only=True, slots=True)
class Allocation:
    """An allocation that this process may start steps in."""

    job: str
    nodes: tuple[NodeInfo, ...] = ()
    """GPUs are what a step sees there; worker slots on nodes without any."""
    names: tuple[str, ...] = ()
    """SLURM's names of the nodes, in the same order."""
    slots: int | None = None
    """Places of a node without GPUs; None = one a core."""
    _asked_s: float = field(default=-1e9, init=False)
    _steps: Mapping[str, str] | None = field(default=None, init=False)
    _steps_s: float = field(default=0.0, init=False)

    @classmethod
    def open(cls, gpus: int | None) -> Allocation:
        """The allocation that this process runs in, with what its nodes have.

        Args:
            gpus: of each node, or places where it has none; None = all that a step sees there.

        Raises:
            ValueError: if there is no allocation, or a node has fewer GPUs.
        """
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            raise ValueError(
                "--engine slurm must run inside an allocation, got no SLURM_JOB_ID; start it by "
                "sbatch, or in the shell of salloc"
            )
        for program in ("srun", "squeue", "scancel", "scontrol", "sinfo"):
            if shutil.which(program) is None:
                raise ValueError(
                    f"--engine slurm must find {program} in PATH, got {os.environ['PATH']}"
                )
        allocation = cls(job=job)
        allocation._look_at_nodes(gpus)
        return allocation

    def _look_at_nodes(self, gpus: int | None) -> None:
        """Asks a process on every node what a step sees there."""
        listed = self._facts("job", self.job)["NodeList"]
        names = self.ask("scontrol", "show", "hostnames", listed).split()
        words = self.step_words(len(names), ("--ntasks-per-node=1",))
        lines = self.ask(*words, *_TASK, "look", "0").splitlines()
        found = {entry["node"]: entry for entry in map(json.loads, lines)}
        least = min(entry["gpus"] for entry in found.values())
        if not least:
            self.slots = gpus
        elif gpus is not None and gpus > least:
            raise ValueError(
                f"--gpus must be at most {least} on each node of the allocation, got {gpus}"
            )
        self.names = tuple(names)
        self.nodes = tuple(
            NodeInfo(
                node=index,
                address=self._facts("node", name)["NodeAddr"],
                gpus=gpus or found[name]["places"],
            )
            for index, name in enumerate(names)
        )

    def step_words(self, num_nodes: int, more: Sequence[str] = ()) -> list[str]:
        """The beginning of an srun that shares all the allocation has with other steps."""
        return [
            *("srun", f"--jobid={self.job}", f"--nodes={num_nodes}", "--overlap", "--overcommit"),
            *("--cpu-bind=none", "--input=none", *more),
        ]

    def steps(self) -> Mapping[str, str]:
        """Name -> id of the steps that SLURM has; an answer serves a moment."""
        if self._steps is None or time.monotonic() > self._steps_s + _STEPS_S:
            words = ("squeue", "--steps", f"--jobs={self.job}", "--noheader", "--format=%i|%j")
            pairs = (line.strip().partition("|") for line in self.ask(*words).splitlines())
            self._steps = {name: step for step, _, name in pairs}
            self._steps_s = time.monotonic()
        return self._steps

    def forget_steps(self) -> None:
        """Has the next question for the steps asked anew."""
        self._steps = None

    def nodes_now(self) -> tuple[NodeInfo, ...]:
        """The nodes with their health, which is asked for now and then."""
        if time.monotonic() > self._asked_s + _HEALTH_S:
            self._asked_s = time.monotonic()
            words = ("sinfo", "--noheader", "--Node", f"--nodes={','.join(self.names)}")
            states = self.try_to_ask(*words, "--format=%N|%t")
            sick = {
                line.partition("|")[0]
                for line in states.split()
                if _SICK.search(line.partition("|")[2])
            }
            self.nodes = tuple(
                replace(node, healthy=self.names[node.node] not in sick) for node in self.nodes
            )
        return self.nodes

    def ask(self, *words: str) -> str:
        """Returns what one of SLURM's programs answers, or a `RuntimeError` in its words."""
        try:
            done = subprocess.run(
                words,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"SLURM must answer {words[0]}, got {error}") from error
        if done.returncode:
            raise RuntimeError(f"SLURM must answer {words[0]}, got {done.stderr.strip()}")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """This process's environment without the words of SLURM and of other launchers."""
        return {
            name: value
            for name, value in inherited_environment().items()
            if not name.startswith(("SLURM", "SRUN_", "SBATCH_", "SALLOC_", "PMI")) or name in _KEPT
        }

    def try_to_ask(self, *words: str) -> str:
        """Returns the answer; nothing, with a warning, where there is none."""
        try:
            return self.ask(*words)
        except RuntimeError as error:
            logger.warning("%s", error)
            return ""

    def _facts(self, kind: str, name: str) -> dict[str, str]:
        """What SLURM says of a job or node."""
        text = self.ask("scontrol", "--oneliner", "show", kind, name)
        pairs = (word.partition("=") for word in text.split())
        return {key: value for key, _, value in pairs}


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
            # Of a step that has ended nothing is left to kill.
            self._allocation.try_to_ask("scancel", "--quiet", "--signal=KILL", step)
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


class SlurmEngine(GangEngine[SlurmGang]):
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
        task = [*_TASK, str(folder.path), str(self.allocation.slots or 0), *self.rank_command]
        log = folder.path / _SRUN_LOG
        child = Child([*words, *task], environment=environment, log=log, umask=0o077)
        folder.write(_SRUN_PID, f"{identity_of(child.pid)}")
        return SlurmGang(folder, spec, self.allocation, child.handle, child)
