"""Every process of a service is killed by SIGKILL at random moments, under clients, on the CPU.

No job is lost, none is trained twice at once, every adapter has the sha256 of an undisturbed job,
and no client gets an error that it could not wait out. `TLORA_ALL_TESTS=1` kills each 50 times,
the sampler, too, and a PostgreSQL server ten times; jobs come as others end, so it ends soon after.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.gang_driver import digest
from tests.helpers.launch import REPO, environment, wait_until
from tests.helpers.postgres import postgres_server
from tests.helpers.store_chaos import check
from tests.helpers.stored_jobs import submit_all
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import Store, open_store
from tlora_megatron.service.supervisor import ProcessHandle

KILLS = 50 if os.environ.get("TLORA_ALL_TESTS") else 1
"""Of each kind of process."""
PROGRAMS = {
    "front": "tlora_megatron.service.api",
    "preparation": "tlora_megatron.service.prepare.worker",
}
ASKED: dict[str, Mapping[str, Any] | None] = {"/v1/jobs": None}
"""What clients ask: paths and bodies."""
if KILLS > 1:
    PROGRAMS["sampler"] = "tlora_megatron.service.sampling.process"
    ASKED["/v1/completions"] = {"model": "base", "prompt": "planet", "max_tokens": 4}
ROLES = ("controller", "gang", *PROGRAMS)
QUICKSTART = REPO / "configs" / "quickstart"
BASE = {"path": str(QUICKSTART / "base"), "dtype": "float32"}
OF_TEXTS = {"data": {"train": str(QUICKSTART / "data" / "ordered_train.jsonl")}}
OF_PAIRS = {"data": {"train": str(QUICKSTART / "pairs" / "train.jsonl")}, "preference": {}}
FIRST = ("job-0",) if KILLS == 1 else ("job-0", "job-1", "job-2")
STEPS = 30 if KILLS == 1 else 150
_LOOK_S = 0.1
"""Before each look at all processes or jobs, which takes milliseconds of their two cores."""


class Service:
    """`tlora serve`, started again whenever it was killed, as an init system would."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._words = words
        self.home = Home.open(folder / "service")
        self.log = folder / "serve.log"
        self._base = folder / "base.json"
        self._base.write_text(json.dumps({"base_model": BASE}))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        words = ("--gpus=1", "--policy=mlora", "--checkpoint-every=2", f"--base=base={self._base}")
        place = (f"--service={self.home.root}", f"--http={self.port}")
        argv = ["serve", *place, *words, *self._words]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tlora_megatron.cli", *argv],
                env=environment(),
                stdout=out,
                stderr=out,
            )

    def kill(self, role: str) -> None:
        """Ends a process as the kernel would, as soon as there is one."""
        if role == "controller":
            self.process.kill()
            self.process.wait()
            self.start()
        else:
            wait_until(partial(self._has_killed, role), role, self.log.read_text)

    def _has_killed(self, role: str) -> bool:
        time.sleep(_LOOK_S)
        if role == "gang":
            return bool([rank.kill() for rank in self.ranks() if not rank.is_over])
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(word.startswith(PROGRAMS[role]) for word in child.cmdline()):
                    child.kill()
                    return True
            except psutil.Error:
                continue
        return False

    def ranks(self) -> list[ProcessHandle]:
        paths = self.home.gangs.glob("*/rank_*.pid")
        return [ProcessHandle.known_as(path.read_text()) for path in paths]

    def close(self) -> None:
        left = psutil.Process(self.process.pid).children(recursive=True)
        for ended in (self.process, *left, *self.ranks()):
            ended.kill()
        self.process.wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    found = Service(tmp_path)
    yield found
    found.close()


def seed_of(name: str) -> int:
    return int(name.split("-")[1]) % len(FIRST)


def submit(store: Store, *names: str) -> None:
    """Submits jobs; those of one seed are the same, and of pairs where it is 0."""
    jobs = [
        {
            "name": name,
            **(OF_TEXTS if seed_of(name) else OF_PAIRS),
            "lora": {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
            "batch_size": 4,
            "max_seq_len": 64,
            "max_steps": STEPS + 5 * seed_of(name),
            "seed": seed_of(name),
        }
        for name in names
    ]
    submit_all(store, {"base_model": BASE, "jobs": jobs})


@contextmanager
def clients(service: Service, token: str) -> Iterator[Counter[tuple[str, int]]]:
    """Clients that ask all the time; yields the counts of their answers by status."""
    found: Counter[tuple[str, int]] = Counter()
    over = threading.Event()

    def ask(path: str, body: Mapping[str, Any] | None) -> None:
        address, method = f"http://127.0.0.1:{service.port}", "GET" if body is None else "POST"
        while not over.wait(_LOOK_S):
            try:
                said = httpx.request(
                    method,
                    address + path,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=60,
                )
                found[path, said.status_code] += 1
            except httpx.TransportError:
                found[path, 0] += 1

    threads = [threading.Thread(target=ask, args=args) for args in ASKED.items()]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _wait_for_all(store: Store, service: Service) -> None:
    def are_over() -> bool:
        time.sleep(_LOOK_S)
        return all(row.state.is_over for row in store.jobs.page(limit=1000))

    wait_until(are_over, "the jobs' end", service.log.read_text)


def _spans(home: Home) -> dict[str, list[tuple[float, float]]]:
    """When gangs trained each job, by what they told."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for path in home.gangs.glob("*/events.jsonl"):
        begun: dict[str, float] = {}
        for event in map(json.loads, path.read_text().splitlines()):
            if event["kind"] == "joined":
                begun[event["job"]] = event["at"]
            is_end = event["kind"] in ("stopped", "died")
            over = [event["job"]] if event["kind"] in ("left", "ended") else [*begun] * is_end
            for job in {*over} & begun.keys():
                spans.setdefault(job, []).append((begun.pop(job), event["at"]))
    return {job: sorted(own) for job, own in spans.items()}


def _check_all(store: Store, home: Home) -> None:
    """All have finished, in one gang at a time, with the adapters of the undisturbed ones."""
    check(store)
    rows = {row.name: row for row in store.jobs.page(limit=1000)}
    assert {str(row.state) for row in rows.values()} == {"finished"}
    spans = _spans(home)
    for name, row in rows.items():
        adapters = [
            digest(home.job(job.id) / "adapter/adapter_model.safetensors")
            for job in (row, rows[FIRST[seed_of(name)]])
        ]
        assert adapters[0] == adapters[1], name
        summary = json.loads((home.job(row.id) / "summary.json").read_text())
        assert row.tokens == summary["tokens"], name
        own = spans[row.id]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own)), own


@pytest.mark.slow
def test_no_kill_loses_doubles_or_changes_a_job(service: Service) -> None:
    def trains() -> bool:  # or never will
        states = {row.state for row in store.jobs.unfinished_rows()}
        return "running" in states or not states

    random, killed = Random(KILLS), Counter[str]()
    with open_store(service.home.store) as store:
        submit(store, *FIRST)
        _wait_for_all(store, service)
        submit(store, *(f"again-{seed}" for seed in range(len(FIRST))))
        with clients(service, store.tokens.make("ann").secret) as answers:
            for number, role in enumerate(random.sample(ROLES * KILLS, len(ROLES) * KILLS)):
                if role == "preparation" or len(store.jobs.unfinished_rows()) < len(FIRST):
                    submit(store, f"new-{number}")
                if role == "gang":
                    wait_until(trains, "a job's training", service.log.read_text)
                time.sleep(random.uniform(0.0, min(3.0, KILLS)))
                service.kill(role)
                killed[role] += 1
            _wait_for_all(store, service)
        _check_all(store, service.home)
        print(f"{dict(killed)} killed; {dict(store.jobs.counts())}")
    print("answers of clients:", dict(answers))
    assert {status for _, status in answers} <= {0, 200, 503}, answers
    assert all(answers[path, 200] for path in ASKED), answers


@pytest.mark.skipif(KILLS == 1, reason="takes minutes: TLORA_ALL_TESTS=1 runs it")
def test_a_database_that_dies_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    random = Random(0)
    with (
        postgres_server() as server,
        closing(Service(tmp_path, f"--database={server.url}")) as service,
        open_store(server.url) as store,
    ):
        submit(store, *FIRST)
        _wait_for_all(store, service)
        with clients(service, store.tokens.make("ann").secret) as answers:
            for number in range(10):
                submit(store, *(f"{number}-{seed}" for seed in range(3)))
                time.sleep(random.uniform(0.0, 3.0))
                server.kill()
                time.sleep(random.uniform(0.0, 2.0))
                server.start()
            _wait_for_all(store, service)
        _check_all(store, service.home)
        assert "Traceback" not in service.log.read_text()
    print("answers of clients:", dict(answers))
    assert {status for _, status in answers} <= {200, 503}, answers
