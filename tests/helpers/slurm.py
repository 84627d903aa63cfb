"""A SLURM of its own on this machine's loopback: munged, slurmctld, and one slurmd a node.

All nodes are this machine. They claim more cores than it has and GPUs that are links to /dev/null,
so that the batch scripts of clusters are accepted as they are. Everything lies in one folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import HANG_S, wait_until

_DAEMONS = ("munged", "slurmctld", "slurmd")
_PROGRAMS = (*_DAEMONS, "munge", "sbatch", "srun", "salloc", "squeue", "scancel", "scontrol")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 Gres=gpu:8\n"


def why_no_slurm() -> str | None:
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"needs SLURM (Debian: slurm-wlm, munge); no {', '.join(missing)}" if missing else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Lets SLURM's programs find it, and nothing of another."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        return inherited | {"PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: object, env: dict[str, str] | None = None) -> str:
        """Runs one of SLURM's programs; returns what it wrote.

        Raises:
            AssertionError: if it fails.
        """
        done = subprocess.run(
            list(map(str, words)),
            env=self.environment | (env or {}),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode}: {words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ...; kept for minutes after the end."""
        return str(self.fields(job)["JobState"])

    def fields(self, job: str) -> dict[str, str]:
        pairs = (word.partition("=") for word in self.call("scontrol", "show", "job", job).split())
        return {key: value for key, _, value in pairs}

    def wait(self, job: str, states: Sequence[str] = ("COMPLETED",)) -> None:
        """Waits until a job is in one of the states.

        Raises:
            AssertionError: if it ends in another, or hangs.
        """

        def is_there() -> bool:
            state = self.state(job)
            assert state in ("PENDING", "RUNNING", "COMPLETING", *states), self.fields(job)
            return state in states

        wait_until(is_there, f"job {job} {states}", lambda: self.fields(job))


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Starts a SLURM; at the end all jobs are cancelled and the daemons stopped by process id."""
    # The path of a socket has at most 107 characters, and everyone must be able to reach it.
    folder = Path(tempfile.mkdtemp(prefix="tlora-slurm-"))
    folder.chmod(0o755)
    cluster = Slurm(folder=folder, nodes=("n1", "n2"))
    try:
        with ExitStack() as stack:
            _configure(cluster)
            _start(cluster, stack)
            stack.callback(_cancel_all, cluster)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(cluster: Slurm) -> None:
    folder, host = cluster.folder, socket.gethostname().partition(".")[0]
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    gpus = [folder / f"gpu{number}" for number in range(8)]
    for gpu in gpus:
        gpu.symlink_to("/dev/null")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    # It loads this plugin even where nothing uses it; v1 does not look for a cgroup tree.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    port, *ports = _free_ports(1 + len(cluster.nodes))
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    text = _CONF.format(host=host, user=user, folder=folder, port=port)
    for name, node_port in zip(cluster.nodes, ports, strict=True):
        (folder / f"spool.{name}").mkdir()
        text += _NODE.format(name=name, host=host, port=node_port)
    (folder / "slurm.conf").write_text(text)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [int(found.getsockname()[1]) for found in sockets]


def _start(cluster: Slurm, stack: ExitStack) -> None:
    folder = cluster.folder
    words = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    words.append(f"--socket={folder}/munge.socket")
    _daemon(cluster, stack, "munged", "--foreground", "--num-threads=2", *words)
    wait_until(lambda: (folder / "munge.socket").exists(), "munged")
    _daemon(cluster, stack, "slurmctld", "-D", "-i")
    for name in cluster.nodes:
        _daemon(cluster, stack, "slurmd", "-D", "-N", name)
    idle = ["idle"] * len(cluster.nodes)
    states = ("sinfo", "--noheader", "--Node", "--format=%t")
    wait_until(lambda: _ask(cluster, *states) == idle, f"idle nodes, see {folder}")


def _daemon(cluster: Slurm, stack: ExitStack, *words: str) -> None:
    log = stack.enter_context((cluster.folder / "daemons.log").open("ab"))
    process = subprocess.Popen(
        words,
        executable=shutil.which(words[0], path=_PATH),
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cancel_all(cluster: Slurm) -> None:
    for words in (["--full", "--signal=KILL"], []):
        _ask(cluster, "scancel", *words, f"--user={os.getuid()}")
    with suppress(AssertionError):
        wait_until(lambda: not _ask(cluster, "squeue", "--noheader"), "empty queue")


def _ask(cluster: Slurm, *words: str) -> list[str]:
    done = subprocess.run(
        words, env=cluster.environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    return done.stdout.split()
