"""One allocation of SLURM: asks about it, and gives orders in it, by SLURM's own programs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tlora_megatron.service.engines.protocol import NodeInfo, inherited_environment

logger = logging.getLogger(__name__)

TASK = (sys.executable, "-m", "tlora_megatron.service.engines.slurm_task")
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
        lines = self.ask(*words, *TASK, "look", "0").splitlines()
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

    def kill_step(self, step: str) -> None:
        """Sends SIGKILL to all processes of a step; one that has ended stays so."""
        self._try("scancel", "--quiet", "--signal=KILL", step)

    def nodes_now(self) -> tuple[NodeInfo, ...]:
        """The nodes with their health, which is asked for now and then."""
        if time.monotonic() > self._asked_s + _HEALTH_S:
            self._asked_s = time.monotonic()
            words = ("sinfo", "--noheader", "--Node", f"--nodes={','.join(self.names)}")
            states = self._try(*words, "--format=%N|%t")
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

    def _try(self, *words: str) -> str:
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
