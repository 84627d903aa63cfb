"""Sets ranks up under the process that started them, explains lost connections, and leaves."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch.distributed import TCPStore


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
    """Sets a rank up under its agent (torchrun or `runtime.ranks`), before it joins others.

    The kernel ends it when the agent is gone: agents end their ranks when they are asked to end,
    but not when they are killed, and the ranks would train on and hold GPUs and output directory.

    Where torchrun may restart the ranks, they get a new store: torchrun (2.11 to 2.13) gives every
    life of them the same one, and they would read the addresses of dead processes there. The count
    of restarts does not tell the lives apart, for torchrun does not count a restart that follows
    one of another node. Does nothing without an agent.
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
