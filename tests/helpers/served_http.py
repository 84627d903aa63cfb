"""`tlora serve --http` in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.launch import HANG_S, REPO, environment
from tlora_megatron.service.home import Home, store_place
from tlora_megatron.service.store import open_store
from tlora_megatron.service.supervisor import ProcessHandle

_PAGE = re.compile(r"page: (http://\S+?)/#token=(\S+)")


@dataclass(frozen=True, slots=True)
class ServedHttp:
    """A service that listens."""

    home: Home
    process: subprocess.Popen[bytes]
    log: Path
    address: str

    def token(self, tenant: str) -> str:
        """A new token of a tenant."""
        with open_store(store_place(self.home)) as store:
            return store.tokens.make(tenant).secret

    def kill_http(self) -> None:
        """Ends the process of HTTP as the kernel would; the service starts another one."""
        for child in psutil.Process(self.process.pid).children():
            if "tlora_megatron.service.api" in child.cmdline():
                child.kill()
                return
        raise AssertionError("there must be a process of HTTP")

    def ranks(self) -> list[ProcessHandle]:
        """All processes that any gang has had."""
        return [
            ProcessHandle.known_as(path.read_text())
            for path in self.home.gangs.glob("*/rank_*.pid")
        ]

    def kill_ranks(self) -> None:
        """Ends all processes of gangs as the kernel would."""
        for rank in self.ranks():
            rank.kill()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits for something; fails with the service's output."""
        _wait(self.process, self.log, holds, what)


@contextmanager
def serving_quickstart(folder: Path) -> Iterator[ServedHttp]:
    """Serves the quickstart's base in float32 under the name `base`, and samples from it."""
    base = folder / "base.json"
    section = {"path": str(REPO / "configs" / "quickstart" / "base"), "dtype": "float32"}
    base.write_text(json.dumps({"base_model": section}))
    words = (f"--base=base={base}", "--sampler=own")
    with serving_http(folder / "service", folder / "serve.log", *words) as found:
        yield found


@contextmanager
def serving_http(root: Path, log: Path, *words: str) -> Iterator[ServedHttp]:
    """Serves a folder on a free port, with one worker slot, so that all jobs train together."""
    argv = ["serve", f"--service={root}", "--gpus=1", "--policy=mlora", "--http=0", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tlora_megatron.cli", *argv],
            env=environment(),
            stdout=out,
            stderr=out,
        )
    served = None
    try:
        _wait(process, log, lambda: _PAGE.search(log.read_text()) is not None, "page")
        found = _PAGE.search(log.read_text())
        assert found is not None
        served = ServedHttp(Home(root), process, log, found[1])
        yield served
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        for ended in (process, *children):
            ended.kill()
        process.wait()
        if served is not None:
            served.kill_ranks()


def _wait(
    process: subprocess.Popen[bytes], log: Path, holds: Callable[[], bool], what: str
) -> None:
    end_s = time.monotonic() + HANG_S
    while not holds():
        assert process.poll() is None, f"it ended:\n{log.read_text()}"
        assert time.monotonic() < end_s, f"no {what}:\n{log.read_text()}"
        time.sleep(0.05)
