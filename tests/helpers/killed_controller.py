"""A service whose controllers are killed while its gang trains, in forks of one process.

    forked("-m", "tests.helpers.killed_controller", ROOT, KILLS, STEPS)

prints a line of JSON: `RESULT {"rows": {name: [state, error]}, "ids": {name: id}, "kills": N}`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.helpers import forked_children
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.stored_jobs import submit_all
from tlora_megatron.service.control.controller import serve
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.home import Home
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import JobState, Store, open_store

QUICKSTART = REPO / "configs" / "quickstart"
BASE = {"path": str(QUICKSTART / "base"), "dtype": "float32"}


class Controllers:
    """One controller at a time; each is a fork of a process that knows nothing of any store.

    SQLite must not be carried over a fork.
    """

    def __init__(self, root: Path) -> None:
        (request, self._requests), (self._pids, pid) = os.pipe(), os.pipe()
        self.pid = 0
        if os.fork() == 0:
            os.close(self._requests)
            os.close(self._pids)
            try:
                _fork_on_request(request, pid, lambda: _control(root))
            finally:
                os._exit(0)
        os.close(request)
        os.close(pid)

    def start(self) -> None:
        os.write(self._requests, b"s")
        self.pid = int.from_bytes(os.read(self._pids, 4), "big")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def check(self) -> None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            raise AssertionError("a controller must not end by itself") from None


def _fork_on_request(requests: int, pids: int, act: Callable[[], None]) -> None:
    """Ends with the last writer of requests, and ends the fork that is left."""
    asked = os.read(requests, 1)
    while asked:
        child = os.fork()
        if child == 0:
            os.close(requests)
            try:
                act()
            finally:
                os._exit(1)
        os.write(pids, child.to_bytes(4, "big"))
        asked = _next_request(requests, child)


def _next_request(requests: int, child: int) -> bytes:
    """Waits for the end of a child and for the next request; empty if there will be none."""
    life, asked = os.pidfd_open(child), b""
    ready, _, _ = select.select([life, requests], [], [])
    if requests in ready:
        asked = os.read(requests, 1)
        if not asked:
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(life)
    return asked or os.read(requests, 1)


def _control(root: Path) -> None:
    forked_children.install()
    # One gang for all: each kill is of the controller of the same jobs.
    settings = Settings(policy="mlora", checkpoint_every_s=2.0)
    serve(root, LocalEngine(root, 0, slots=1, preforked=1), settings=settings, said=print)


def submit(store: Store, steps: int) -> None:
    jobs = [
        {
            "name": f"job{i}",
            "data": {"train": str(QUICKSTART / "data" / "ordered_train.jsonl")},
            "lora": {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
            "batch_size": 4,
            "max_seq_len": 64,
            "max_steps": steps + 5 * i,
            "seed": i,
        }
        for i in range(3)
    ]
    submit_all(store, {"base_model": BASE, "jobs": jobs})


def train(store: Store, controllers: Controllers, kills: int) -> int:
    """Trains all jobs; returns how many controllers were killed, at most `kills`."""
    random, killed, end_s = Random(kills), 0, time.monotonic() + HANG_S + 10 * kills
    controllers.start()
    while not all(row.state.is_over for row in store.jobs.page()):
        assert time.monotonic() < end_s, store.jobs.page()
        controllers.check()
        time.sleep(random.uniform(0.0, 1.5) if killed < kills else 0.1)
        # Reading the data takes longer than most controllers live: one dies over it.
        busy = killed > 0 and any(row.state is JobState.VALIDATING for row in store.jobs.page())
        is_over = all(row.state.is_over for row in store.jobs.page())
        if killed < kills and not busy and not is_over and _rules(store, controllers.pid):
            killed += 1
            controllers.kill()
            controllers.start()
    return killed


def _rules(store: Store, pid: int) -> bool:
    """True if a controller holds the lock: one that still starts is not worth killing."""
    lock = store.lock.holder()
    return lock is not None and bool(lock.owner) and json.loads(lock.owner)["pid"] == pid


def main(root: Path, kills: int, steps: int) -> None:
    home = Home.open(root)
    controllers = Controllers(home.root)
    with open_store(home.store) as store:
        submit(store, steps)
        killed = train(store, controllers, kills)
        controllers.kill()
        rows = store.jobs.page()
        found = {
            "rows": {row.name: [str(row.state), row.error] for row in rows},
            "ids": {row.name: row.id for row in rows},
            "kills": killed,
        }
        print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
