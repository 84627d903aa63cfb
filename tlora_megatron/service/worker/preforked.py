"""A pre-forked worker: a process that has everything imported and waits to become a rank.

    python -m tlora_megatron.service.worker.preforked [--forks]

Orders are lines of JSON on stdin: `{"folder": ..., "rank": ..., "env": {...}}`. It becomes the rank
of the first one, or with `--forks`, for hosts without GPUs, forks a rank for each. It ends with its
stdin, when the service ends; its ranks go on.
"""

from __future__ import annotations

import gc
import os
import random
import select
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tlora_megatron.channel import LinePipe
from tlora_megatron.ops.kernel_build import build_early
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.worker import rank as rank_process


def main(argv: list[str]) -> int:
    """Imports, says `ready`, and serves orders until stdin ends."""
    forks = "--forks" in argv
    if not forks:
        build_early()
    rank_process.import_all()
    if not forks:
        # Triton hashes itself, half a second that a process's first kernel would wait for. Its
        # place is Triton's own; without it a kernel does it.
        with suppress(ImportError, OSError):
            from triton.runtime.cache import triton_key

            triton_key()
    serve_orders(forks=forks)
    return 0


def serve_orders(*, forks: bool) -> None:
    """Serves the orders on stdin until its end; returns in no rank."""
    if forks:
        count = len(os.listdir("/proc/self/task"))
        if count != 1:
            raise RuntimeError(f"only a process of one thread may be forked, got {count} threads")
        gc.collect()
        gc.freeze()  # what a rank collects would otherwise copy this process's pages
    pipe = LinePipe.of_child()
    pipe.send({"ready": True})
    children: dict[int, tuple[int, GangFolder, int]] = {}
    while not pipe.is_over:
        poll = select.poll()
        for descriptor in (pipe.fileno(), *children):
            poll.register(descriptor, select.POLLIN)
        for descriptor in sorted((ready for ready, _ in poll.poll()), reverse=True):
            if descriptor != pipe.fileno():  # children come before stdin
                child, folder, rank = children.pop(descriptor)
                _, status = os.waitpid(child, 0)
                with suppress(OSError):  # where its engine, which is not its parent, finds it
                    folder.write(f"exit_{rank}", str(os.waitstatus_to_exitcode(status)))
                os.close(descriptor)
                continue
            for order in pipe.receive():
                _carry_out(order, pipe, children if forks else None)


def _carry_out(
    order: dict[str, Any], pipe: LinePipe, children: dict[int, tuple[int, GangFolder, int]] | None
) -> None:
    folder, rank = GangFolder.at(Path(order["folder"])), int(order["rank"])
    if children is None:
        _become(folder, rank, order["env"], pipe)
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor in children:
            os.close(descriptor)
        random.seed()
        _become(folder, rank, order["env"], pipe)
    children[os.pidfd_open(child)] = (child, folder, rank)


def _become(folder: GangFolder, rank: int, environment: dict[str, str], pipe: LinePipe) -> NoReturn:
    """Turns this process into what a new one of the rank would be."""
    code = rank_process.FAILED
    try:
        os.environ.update(environment)
        log = os.open(folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        pipe.close()  # a rank takes no orders
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        code = rank_process.main([str(folder.path), str(rank)])
    except BaseException:
        traceback.print_exc()
    rank_process.end(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
