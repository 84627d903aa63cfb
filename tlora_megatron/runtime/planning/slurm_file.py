"""Writes the sbatch script of a plan: its resources, its environment, its start and its end."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tlora_megatron.config.reader import must

_OPTION = re.compile(r"[a-z][a-z-]*[a-z]")
_TIME = re.compile(r"(\d+|\d+-\d\d?)(:[0-5]?\d){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_NAMES = re.compile(r"[\w.@%+/-]+(,[\w.@%+/-]+)*")
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_VALUES = {
    **dict.fromkeys(
        ("time", "time-min"),
        (_TIME, "be like 90 (minutes), 12:00:00 or 1-12:00 (a day and 12 hours)"),
    ),
    **dict.fromkeys(
        ("account", "partition", "qos", "reservation"),
        (_NAMES, "be a name, or several with commas between them"),
    ),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), (_MEMORY, "be like 64G")),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), (re.compile(r"[1-9]\d*"), "be a number")),
}
"""Option of sbatch -> what a value of it looks like, in full and in words."""
_CORES_OF_A_GPU = 8
"""Cores that a node has for each of its GPUs, at least, on all machines with a profile."""
_OF_THE_PLAN = ("nodes", "ntasks", "ntasks-per-node")

_SCRIPT = """\
#!/usr/bin/env bash
# @NOTE@
# Five minutes before its time is over (--signal) the run saves all jobs and is requeued; submitted
# again, it continues them. All nodes must see the files, and find the environment below.
@OPTIONS@
set -eo pipefail
@SETUP@set -u
cd "${SLURM_SUBMIT_DIR:-.}"
# srun does not take the cores of a task from the batch script by itself.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-@CORES@}
threads=$((SRUN_CPUS_PER_TASK / @GPUS@))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# torchrun passes SIGUSR1 on, waits until the jobs are saved, and leaves no empty folders in /tmp.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 PET_LOG_DIR=/dev/null
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}
@MEETING@srun --kill-on-bad-exit=1 "${PYTHON:-python3}" -m torch.distributed.run \\
  @AGENT@ --nproc-per-node @GPUS@ \\
  -m tlora_megatron.cli train @JOBS@ "$@" &
run=$! asked=
# SLURM tells this shell alone; srun passes the signal on to the torchrun of every node.
trap 'asked=1; kill -USR1 "$run"' USR1
code=0
wait "$run" || code=$?
[[ -n $asked ]] || exit "$code"
wait "$run" && exit 0 # the signal has ended the first wait; all jobs may have finished meanwhile
scontrol requeue "$SLURM_JOB_ID"
exit 138
"""
_MEETING = r"""# All meet at the first node, by SLURM's address: its name may be unknown to others.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
first=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
# A port of its own, should two runs share a node.
endpoint=$first:$((20000 + SLURM_JOB_ID % 10000))
# Where NCCL takes the wrong card or network: NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
"""
_MANY = '--nnodes @NODES@ --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$endpoint"'
_INSTEAD = {
    "mem": ("mem-per-cpu", "mem-per-gpu"),
    "cpus-per-task": ("cpus-per-gpu",),
    "gpus-per-node": ("gres", "gpus-per-task"),
}
"""Option -> those that SLURM takes in its place, and not beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """The options of a batch script that only the user of a cluster knows.

    Raises:
        ConfigError: for an option of sbatch that is none, or that the plan decides.
    """

    sbatch: tuple[str, ...] = ()
    """Options as NAME=VALUE or NAME; they replace the defaults. NAME= leaves a default out."""
    setup: tuple[str, ...] = ()
    """Shell lines before the environment is activated."""
    environment: str | None = None
    """Shell line that activates the environment; None: the one that this process runs in."""

    def __post_init__(self) -> None:
        for word in self.sbatch:
            _check_option(word)


def slurm_script(
    jobs: Path, nodes: int, gpus: int, *, whole_nodes: bool, note: str, options: SlurmOptions
) -> str:
    """The text of a script for sbatch; `whole_nodes`: a node has no further GPUs."""
    given = _given_options(options.sbatch, gpus)
    cores = str(_CORES_OF_A_GPU * gpus)
    # By itself --exclusive gives all cores, but not the memory.
    whole: dict[str, str | None] = {"exclusive": None, "mem": "0"} if whole_nodes else {}
    named: dict[str, str | None] = {  # what holds on most clusters
        "job-name": "tlora",
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(gpus),
        "cpus-per-task": cores,
        **whole,
        "time": "24:00:00",
        "requeue": None,
        "signal": "B:USR1@300",
        "open-mode": "append",
        "output": "slurm-%x-%j.log",
        **given,
    }
    for name, others in _INSTEAD.items():
        if name not in given and not given.keys().isdisjoint(others):
            named[name] = ""
    own = current_environment() if options.environment is None else [options.environment]
    values = {
        "@NOTE@": note,
        "@OPTIONS@": "\n".join(_directive(*pair) for pair in named.items() if pair[1] != ""),
        "@SETUP@": "".join(f"{line}\n" for line in (*options.setup, *own) if line),
        "@MEETING@": _MEETING if nodes > 1 else "",
        "@AGENT@": _MANY if nodes > 1 else "--standalone",
        "@NODES@": str(nodes),
        "@GPUS@": str(gpus),
        "@CORES@": cores,
        "@JOBS@": shlex.quote(str(jobs)),
    }
    # The text for a place of the script may hold places itself.
    values["@AGENT@"] = values["@AGENT@"].replace("@NODES@", values["@NODES@"])
    return re.sub("|".join(values), lambda found: values[found[0]], _SCRIPT)


def _given_options(words: Iterable[str], gpus: int) -> dict[str, str | None]:
    given: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name == "gpus-per-node" and value and value.rpartition(":")[2] != str(gpus):
            raise must("--sbatch", f"be gpus-per-node={gpus} or gpus-per-node=TYPE:{gpus}", word)
        given[name] = value if equals else None
    return given


def _check_option(word: str) -> None:
    """Refuses what sbatch would refuse, or take for something else, whatever the plan is."""
    name, equals, value = word.partition("=")
    if not _OPTION.fullmatch(name) or not value.isprintable():
        raise must("--sbatch", "be an option of sbatch like account=NAME or exclusive", word)
    if name in _OF_THE_PLAN:
        raise must("--sbatch", f"leave {name} to the plan", word, "--gpus gives the number")
    pattern, rule = _VALUES.get(name, (None, ""))
    is_left_out = equals and not value
    if pattern is not None and not is_left_out and not pattern.fullmatch(value):
        raise must(f"--sbatch {name}", rule, value if equals else None)


def _directive(name: str, value: str | None) -> str:
    if value is None:
        return f"#SBATCH --{name}"
    return f"#SBATCH --{name}={shlex.quote(value) if set(value) & set(' #') else value}"


def current_environment(
    environ: Mapping[str, str] = os.environ, prefix: str = sys.prefix
) -> list[str]:
    """Shell lines that activate the environment of this process; none if Python is the system's."""
    conda = environ.get("CONDA_EXE")
    if conda is not None and environ.get("CONDA_PREFIX") == prefix:
        hook = Path(conda).parents[1] / "etc" / "profile.d" / "conda.sh"
        return [f"source {shlex.quote(str(hook))}", f"conda activate {shlex.quote(prefix)}"]
    script = Path(prefix) / "bin" / "activate"
    return [f"source {shlex.quote(str(script))}"] if script.is_file() else []
