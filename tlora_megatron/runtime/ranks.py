"""Starts and ends the ranks of a run, sets them up under their starter, and says which one failed.

torchrun does this for several machines. Here the process that the user has started needs no torch,
saves the seconds of its import, and leaves no folders behind.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from tlora_megatron import timeline
from tlora_megatron.training.signals import (
    STOP_SIGNALS,
    SignalCounter,
    SignalPipe,
    exit_code,
    is_stop_code,
    signal_pipe,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore


logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""From SIGTERM to SIGKILL for ranks that another one's failure ends. Shorter than the time for
which ranks other than the first keep an error to themselves that is likely the first one's too."""
_PORTS = range(20000, 32768)
"""Below those that Linux gives to outgoing connections: none of these takes a port away between
its choice here and its use by rank 0, seconds later."""


def run_ranks(command: Sequence[str], nproc: int, *, stop_timeout_s: float) -> int:
    """Runs a command in `nproc` processes that find each other as torchrun's do.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks. When one fails, the others are ended.

    Args:
        stop_timeout_s: from the first signal, or the first rank that stopped by one, to SIGKILL.

    Returns:
        The exit code of the first rank that failed, 128 + n if signal n ended it or stopped the
        run; else 0.
    """
    return _Ranks(nproc, stop_timeout_s).run(command)


class _Ranks:
    def __init__(self, nproc: int, stop_timeout_s: float) -> None:
        self._nproc = nproc
        self._stop_timeout_s = stop_timeout_s
        self._living: dict[int, subprocess.Popen[bytes]] = {}
        self._signals = SignalCounter()
        self._failure = 0
        """Exit code of the first rank that failed."""
        self._stopped = 0
        """Exit code of ranks that a signal has stopped."""
        self._kill_at_s = math.inf
        self._has_killed = False

    def run(self, command: Sequence[str]) -> int:
        """Starts all ranks and waits for their end; returns the run's exit code."""
        with signal_pipe((*STOP_SIGNALS, signal.SIGCHLD)) as pipe:
            try:
                self._start(command)
                while self._living:
                    self._wait(pipe)
            finally:
                self._send(signal.SIGKILL)
                os.close(pipe.reading)
        return self._failure or self._stopped

    def _start(self, command: Sequence[str]) -> None:
        port = free_port()
        for rank in range(self._nproc):
            self._living[rank] = subprocess.Popen(
                command,
                env=os.environ | rank_environment(rank, self._nproc, port),
                stdin=subprocess.DEVNULL,
                # A terminal would send Ctrl-C to the ranks as well: they would get it twice.
                start_new_session=True,
            )

    def _wait(self, pipe: SignalPipe) -> None:
        """Waits until a rank ends, a signal comes or time is up, and does what is due."""
        left_s = self._kill_at_s - time.monotonic()
        ready, _, _ = select.select(
            [pipe.reading], [], [], None if left_s == math.inf else max(0, left_s)
        )
        if not ready:
            self._kill_late_ranks()
        for number in pipe.read() or () if ready else ():
            if number != signal.SIGCHLD:
                self._pass_on(number)
        self._collect()

    def _pass_on(self, number: int) -> None:
        is_second = self._signals.count(number)
        self._send(number)
        self._kill_within(_GRACE_S if is_second else self._stop_timeout_s)

    def _collect(self) -> None:
        """Takes ranks that have ended; of several the one is to blame that could not say why."""
        ended = {rank: process.poll() for rank, process in self._living.items()}
        codes = {rank: code for rank, code in ended.items() if code is not None}
        for rank in codes:
            del self._living[rank]
        for rank, code in sorted(codes.items(), key=lambda item: (item[1] >= 0, item[0])):
            self._judge(rank, code)

    def _judge(self, rank: int, code: int) -> None:
        """Draws the consequences of a rank's end."""
        if code == 0 or self._failure or self._has_killed:
            return
        if code == -self._signals.first or is_stop_code(code):
            number = -code if code < 0 else code - exit_code(0)
            self._stopped = exit_code(number)
            if not self._signals.first:
                self._pass_on(number)  # it came to this rank alone
            return
        self._failure = exit_code(-code) if code < 0 else code
        if code < 0:
            # A rank that fails has said why; one ended by a signal could not say anything.
            logger.error("%s", describe_death(rank, -code))
        self._send(signal.SIGTERM)
        self._kill_within(_GRACE_S)

    def _kill_within(self, seconds: float) -> None:
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + seconds)

    def _kill_late_ranks(self) -> None:
        first = self._signals.first
        if not self._failure and first:
            self._stopped = exit_code(first)
            logger.error(
                "rank %s on host %s did not end within %g s of %s (run.stop_timeout_s) and is "
                "killed; the same command continues every job from its last checkpoint",
                ", ".join(map(str, self._living)),
                socket.gethostname(),
                self._stop_timeout_s,
                signal.Signals(first).name,
            )
        self._has_killed = True
        self._send(signal.SIGKILL)
        self._kill_at_s = math.inf

    def _send(self, number: int) -> None:
        for process in self._living.values():
            process.send_signal(number)


def describe_death(rank: int, number: int) -> str:
    why = "; the kernel sends it when memory runs out" if number == signal.SIGKILL else ""
    name = signal.Signals(number).name
    return f"rank {rank} on host {socket.gethostname()} was ended by signal {number} ({name}{why})"


def rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Returns torchrun's variables for one rank of this machine; rank 0's store is at `port`."""
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "GROUP_RANK": 0,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "ROLE_WORLD_SIZE": nproc,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "tlora",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads_per_rank(nproc)),
        timeline.BEGIN_VARIABLE: timeline.process_timeline().begin_s,
    }
    return {key: str(value) for key, value in values.items()}


def threads_per_rank(nproc: int) -> str:
    """Returns the threads of each of `nproc` ranks; torchrun would set 1 however many cores."""
    return str(max(1, len(os.sched_getaffinity(0)) // nproc))


def free_port() -> int:
    """Returns a port of this machine on which nobody listens."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"a port of {_PORTS.start} to {_PORTS.stop - 1} must be free, got none")


def cli_command(argv: Sequence[str]) -> list[str]:
    """The command line of this package's `tlora ARGV` in a rank."""
    return [sys.executable, "-m", "tlora_megatron.cli", *argv]


_WATCHERS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
"""Environment variables under which something may wait for this process's ordinary exit."""


def leave(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does: threads awaited, exit handlers run, output written.

    But modules are not torn down, which takes over a second of CPU time once torch and Megatron are
    imported. A profiler or debugger that needs the ordinary exit gets it.
    """
    is_watched = sys.gettrace() or sys.getprofile() or sys.flags.inspect
    if is_watched or any(name in os.environ for name in _WATCHERS):
        sys.exit(code)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # who read the output has gone; Python would end with 120
        code = code or 120
    os._exit(code)


_PR_SET_PDEATHSIG = 1
_MEET_S = 300
"""Between the first and the last rank's start: imports from a slow file system."""
_POLL_S = 0.05
_LOST_TYPES = ("DistBackendError", "DistNetworkError")
_LOST_TEXTS = ("gloo/transport/", "Gloo connectFullMesh failed")


def join_agent() -> None:
    """Sets a rank up under its agent (torchrun or `runtime.ranks`), if it has one.

    The kernel ends it with the agent: one that is killed leaves its ranks, which would train on.
    Where torchrun may restart the ranks, they get a new store: torchrun (2.11 to 2.13) gives every
    life of them the same one, with the addresses of dead processes. Its count of restarts does not
    tell the lives apart: it leaves out restarts that follow one of another node.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    if may_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _renew_store()


def _renew_store() -> None:
    """Has rank 0 open a store of its own on another port; collective over the ranks."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_MEET_S))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = _welcome(shared, world_size) if rank == 0 else _arrive(shared, rank)
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _arrive(shared: TCPStore, rank: int) -> int:
    """Waits to be told this life's port; an answer to an earlier life's visit is not read."""
    visit = uuid.uuid4().hex
    shared.set(f"tlora/visit/{rank}", visit)
    life, port = shared.get(f"tlora/welcome/{visit}").decode().split()
    shared.set(f"tlora/thanks/{life}/{rank}", "")
    return int(port)


def _welcome(shared: TCPStore, world_size: int) -> int:
    """Tells every visitor the port, those of an earlier life too, until all of this one thanked."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    life, missing, end_s = uuid.uuid4().hex, set(range(1, world_size)), time.monotonic() + _MEET_S
    while missing:
        if time.monotonic() > end_s:
            raise RuntimeError(f"ranks must meet within {_MEET_S} s, got none of {sorted(missing)}")
        for rank in sorted(missing):
            if shared.check([f"tlora/visit/{rank}"]):
                visit = shared.get(f"tlora/visit/{rank}").decode()
                shared.set(f"tlora/welcome/{visit}", f"{life} {port}")
        missing = {rank for rank in missing if not shared.check([f"tlora/thanks/{life}/{rank}"])}
        time.sleep(_POLL_S)
    return port


def is_lost_connection(error: BaseException) -> bool:
    """True if gloo, NCCL or the store says that another process cannot be reached."""
    return type(error).__name__ in _LOST_TYPES or any(part in str(error) for part in _LOST_TEXTS)


def describe_failure(error: BaseException) -> str:
    """The error's own words; for a lost connection what happened and what to do, then those."""
    text = str(error) or type(error).__name__
    if not is_lost_connection(error):
        return text
    return (
        "the connection to another process of this run is lost: that process or its node has ended "
        "or cannot be reached, and its own output says why. The same command continues every job "
        f"from its last checkpoint. ({text.splitlines()[0]})"
    )


def leave_process_group() -> None:
    """Ends this process's part in the process group; NCCL warns of processes that only exit."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
