"""Worlds of ranks that are forked from one process which has everything imported already.

One server process a test session does the imports, without starting a thread or a process group
(tests/README.md). For each world it forks a nanny, and the nanny forks the ranks, hosts their store
as torchrun's agent would, and ends them all when one fails or when the caller is gone. A rank runs
its script as `python SCRIPT ARGS` would. Nothing is left behind in the server, so worlds may be
killed and may patch whatever they like.

    log = world("tests/helpers/train_worker.py", 2, "cases.json")   # as torchrun --nproc-per-node 2
    log = forked("-m", "tlora_megatron.cli", "plan", ...)           # as python -m ...

What differs from real processes: ranks share one hash seed, and the interpreter is not torn down
at the end. Tests of the launch itself therefore use `tests.helpers.launch`. With GPUs real
processes are started everywhere, because CUDA does not survive a fork. `TLORA_WORLD_LOG=FILE` adds
a line of CPU seconds, wall seconds and command for every world.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.launch import HANG_S, IDLE_S, REPO, environment, python, torchrun
from tests.helpers.session import WORLD_SERVER

_STARTED: list[subprocess.Popen[bytes]] = []
_PRELOADED = (
    "torch.distributed.run", "torch.distributed.tensor", "torch.optim.lr_scheduler",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2", "peft",
    "megatron.core.models.gpt", "tlora_megatron.cli.main", "tlora_megatron.cli.train",
    "tlora_megatron.integrations.megatron.engine", "tlora_megatron.runtime.controller",
    "tests.helpers.oracle", "tests.helpers.te_stand_in",
)  # fmt: skip
_PRELOADED_WITH_DEEPSPEED = ("deepspeed", "tlora_megatron.deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    command: list[str]
    """Words as behind `python`: a script, `-m MODULE` or `-c CODE`, and arguments."""
    nproc: int | None
    """Ranks with torchrun's environment; None = one process without it."""
    environment: dict[str, str]
    output: str
    """File that gets stdout and stderr of all ranks."""


def world(worker: Path | str, nproc: int, *args: object) -> str:
    """Runs a worker script (or dotted module) in `nproc` ranks, as `torchrun` does.

    Returns:
        What the ranks wrote to stdout and stderr.

    Raises:
        AssertionError: if a rank fails or all hang; holds the end of the output.
    """
    if _has_gpu():
        return torchrun(worker, nproc, *args)
    is_module = isinstance(worker, str) and not worker.endswith(".py")
    return _run(["-m", str(worker)] if is_module else [str(worker)], args, nproc)


def forked(*args: object) -> str:
    """Runs Python with arguments in one process, as `launch.python` does.

    Raises:
        AssertionError: as `world`.
    """
    return python(*args) if _has_gpu() else _run([], args, None)


def forked_result(*args: object) -> dict[str, Any]:
    """The JSON that a program run by `forked` prints behind the word RESULT."""
    (line,) = (line for line in forked(*args).splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))


def session_address() -> str:
    """Fixes the address of this session's server, for this process and those it starts."""
    return os.environ.setdefault(WORLD_SERVER, f"tlora-worlds-{os.getpid()}-{os.urandom(4).hex()}")


def _has_gpu() -> bool:
    import torch  # not at the top: the server's first import of it is timed by nobody else

    return torch.cuda.is_available()


def _run(prefix: Sequence[str], args: Sequence[object], nproc: int | None) -> str:
    command = [*prefix, *map(str, args)]
    with tempfile.NamedTemporaryFile(prefix="world-", suffix=".log") as file, _connect() as channel:
        request = Request(command=command, nproc=nproc, environment=environment(), output=file.name)
        channel.sendall(json.dumps(asdict(request)).encode() + b"\n")
        with channel.makefile("r") as answers:
            answer = answers.readline()
        output = Path(file.name).read_text(errors="replace")
    said = json.loads(answer or '"the world\'s server has ended"')
    assert said == "done", f"{said}: {command}\n{output[-8000:]}"
    return output


def _connect() -> socket.socket:
    address = "\0" + session_address()
    channel = socket.socket(socket.AF_UNIX)
    if channel.connect_ex(address) == 0:
        return channel
    # Of two started at once, the second finds the address taken and ends.
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    command = [sys.executable, "-m", "tests.helpers.standing_world", str(owner)]
    _STARTED.append(
        subprocess.Popen(
            command,
            cwd=REPO,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    end_s = time.monotonic() + HANG_S
    while channel.connect_ex(address):
        assert time.monotonic() < end_s, "the world's server must start"
        time.sleep(0.05)
    return channel


def serve(owner: int) -> None:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + os.environ[WORLD_SERVER])
    except OSError:
        return  # another one serves
    listener.listen(64)
    life = os.pidfd_open(owner)
    _preload()
    while True:
        ready, _, _ = select.select([listener, life], [], [])
        if life in ready:
            return
        channel, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(life)
            _Nanny(channel).run()
        channel.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _preload() -> None:
    import importlib

    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _PRELOADED_WITH_DEEPSPEED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    count = len(os.listdir("/proc/self/task"))
    assert count == 1, f"only a process of one thread may be forked, got {count}"
    gc.collect()
    gc.freeze()  # what a rank collects would otherwise copy the server's pages


class _Nanny:
    """Runs one world; lives in a fork of the server, and ends with `os._exit`."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.begin_s = time.monotonic()
        with channel.makefile("r") as lines:
            self.request = Request(**json.loads(lines.readline()))

    def run(self) -> NoReturn:
        try:
            said = self._watch(self._fork_ranks())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        self._log()
        with contextlib.suppress(OSError):
            self.channel.sendall(json.dumps(said).encode() + b"\n")
        os._exit(0)

    def _fork_ranks(self) -> dict[int, int]:
        """Process ids by pidfd. The ranks start when they learn their store's port."""
        ranks, read, write = {}, *os.pipe()
        for rank in range(self.request.nproc or 1):
            child = os.fork()
            if child == 0:
                self.channel.close()
                os.close(write)
                _become_rank(self.request, rank, read)
            ranks[os.pidfd_open(child)] = child
        os.close(read)
        if self.request.nproc is not None:
            from torch.distributed import TCPStore

            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, self.store.port.to_bytes(2, "big") * len(ranks))
        os.close(write)
        return ranks

    def _watch(self, ranks: dict[int, int]) -> str:
        """Waits for all; returns "done" or what went wrong."""
        failure, used_s, since_s = "", 0.0, time.monotonic()
        while ranks:
            ready, _, _ = select.select([*ranks, self.channel], [], [], 1.0)
            for descriptor in set(ready) & set(ranks):
                _, status = os.waitpid(ranks.pop(descriptor), 0)
                failure = failure or _ending(os.waitstatus_to_exitcode(status))
            now_s, total_s = time.monotonic(), _cpu_seconds(ranks.values())
            if total_s > used_s + 0.01 * (now_s - since_s):
                used_s, since_s = total_s, now_s
            if now_s - since_s > IDLE_S:
                failure = f"no rank has computed for {IDLE_S:.0f} s"
            elif now_s - self.begin_s > HANG_S:
                failure = f"took over {HANG_S:.0f} s"
            if failure or self.channel in ready:  # the caller says nothing more: it is gone
                _end(ranks)
                return failure or "given up"
        return "done"

    def _log(self) -> None:
        path = self.request.environment.get("TLORA_WORLD_LOG")
        if not path:
            return
        import resource

        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall_s = time.monotonic() - self.begin_s
        words = f"{self.request.nproc or 1} x {' '.join(self.request.command)[:300]!r}"
        with open(path, "a") as file:
            file.write(f"{used.ru_utime + used.ru_stime:7.1f} {wall_s:7.1f} {words}\n")


def _ending(code: int) -> str:
    """How a rank has failed; empty if it has not."""
    if code >= 0:
        return f"exit {code}" if code else ""
    return f"exit {code} ({signal.Signals(-code).name})"


def _cpu_seconds(pids: object) -> float:
    """CPU time of processes and of the children they have, dead or alive."""
    import psutil

    total = 0.0
    for pid in pids:  # type: ignore[attr-defined]
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    total += sum(member.cpu_times()[:4])
    return total


def _end(ranks: Mapping[int, int]) -> None:
    """Ends ranks; those who do not listen within a few seconds are killed."""
    # Ranks fail together: the others, too, get to say why.
    select.select([], [], [], 0.3)
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 60.0)):
        for pid in ranks.values():
            os.kill(pid, number)
        end_s = time.monotonic() + patience_s
        left = list(ranks)
        while left and time.monotonic() < end_s:
            ready, _, _ = select.select(left, [], [], end_s - time.monotonic())
            left = [descriptor for descriptor in left if descriptor not in ready]
        if not left:
            break
    for pid in ranks.values():
        os.waitpid(pid, 0)


def _become_rank(request: Request, rank: int, port_pipe: int) -> NoReturn:
    """Turns this fork into what a new process of the rank would be, and runs its command."""
    import numpy

    code = 1
    try:
        output = os.open(request.output, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        os.environ.clear()
        os.environ.update(request.environment)
        if request.nproc is not None:
            port = int.from_bytes(os.read(port_pipe, 2), "big")
            os.environ.update(_torchrun_environment(rank, request.nproc, port))
        os.close(port_pipe)
        random.seed()
        numpy.random.seed()
        code = _run_command(request.command)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    values = {
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "standing-world",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()}


def _run_command(command: Sequence[str]) -> int:
    first, *rest = command
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]))
