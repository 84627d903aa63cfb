"""`tlora serve` in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.launch import REPO, environment, wait_until
from tlora_megatron.service.home import Home, store_place
from tlora_megatron.service.store import open_store
from tlora_megatron.service.supervisor import ProcessHandle

_PAGE = re.compile(r"page: (http://\S+?)/#token=(\S+)")


def as_chats(rows: Iterable[str]) -> str:
    """Lines of prompts and completions as lines of conversations."""
    found = []
    for row in map(json.loads, rows):
        asked = {"role": "user", "content": row["prompt"].removesuffix("\n")}
        answer = {"role": "assistant", "content": row["completion"]}
        found.append(json.dumps({"messages": [asked, answer]}) + "\n")
    return "".join(found)


@dataclass(frozen=True, slots=True)
class Served:
    """A service that runs."""

    home: Home
    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> list[ProcessHandle]:
        """All processes that any gang has had."""
        paths = self.home.gangs.glob("*/rank_*.pid")
        return [ProcessHandle.known_as(path.read_text()) for path in paths]

    def kill_ranks(self) -> None:
        """Ends all processes of gangs as the kernel would."""
        for rank in self.ranks():
            rank.kill()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits for something; fails with the service's output."""

        def is_there() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.log.read_text()}"
            return holds()

        wait_until(is_there, what, self.log.read_text)


@dataclass(frozen=True, slots=True)
class ServedHttp(Served):
    """A service that listens."""

    address: str

    def token(self, tenant: str) -> str:
        with open_store(store_place(self.home)) as store:
            return store.tokens.make(tenant).secret

    def kill_http(self) -> None:
        """Ends the process of HTTP as the kernel would; the service starts another one."""
        for child in psutil.Process(self.process.pid).children():
            if "tlora_megatron.service.api" in child.cmdline():
                child.kill()
                return
        raise AssertionError("there must be a process of HTTP")


@contextmanager
def serving(root: Path, log: Path, *words: str) -> Iterator[Served]:
    """Serves a folder with one worker slot and a policy that lets all jobs train together."""
    argv = ["serve", f"--service={root}", "--gpus=1", "--policy=mlora", *words]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tlora_megatron.cli", *argv],
            env=environment(),
            stdout=out,
            stderr=out,
        )
    served = Served(Home(root), process, log)
    try:
        yield served
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        for ended in (process, *children):
            ended.kill()
        process.wait()
        served.kill_ranks()


@contextmanager
def serving_http(root: Path, log: Path, *words: str) -> Iterator[ServedHttp]:
    """Serves a folder on a free port, too."""
    with serving(root, log, "--http=0", *words) as served:
        served.wait_until(lambda: _PAGE.search(log.read_text()) is not None, "page")
        found = _PAGE.search(log.read_text())
        assert found is not None
        yield ServedHttp(served.home, served.process, log, found[1])


@contextmanager
def serving_quickstart(folder: Path, dtype: str = "bfloat16", *more: str) -> Iterator[ServedHttp]:
    """Serves the quickstart's base under the name `base`, and samples from it."""
    base = folder / "base.json"
    section = {"path": str(REPO / "configs" / "quickstart" / "base"), "dtype": dtype}
    base.write_text(json.dumps({"base_model": section}))
    words = (f"--base=base={base}", "--sampler=own", *more)
    with serving_http(folder / "service", folder / "serve.log", *words) as found:
        yield found
