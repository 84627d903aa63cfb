"""Tenants of the `tinker` SDK on one super-model: a real one, or one that only pretends.

Of the one that pretends, all requests that wait are taken at once, as a round of the real loop
does, and answered after the time that such a round would take: it shows what the API costs.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import psutil

from scripts.bench.doors import tenants
from scripts.bench.doors.serving import BASE, Served, serving
from scripts.bench.harness.rows import Figures
from tests.helpers.played_models import set_state
from tlora_megatron.service.home import Home
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import OVER, JobState, Store, open_store
from tlora_megatron.training.driven_requests import Answer, Request

ROUND_S = 0.02
TOKENS_PER_S = 100_000.0
"""A round takes `ROUND_S`, and its tokens at this speed."""
_LOOK_S = 0.005


class PretendedGang:
    """Takes the next request of every job at once, and answers without a model."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._logs: dict[str, tuple[RequestLog, int]] = {}
        self.rounds = 0
        self.widest = 0
        """Most jobs in one round."""

    def play(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_S):
            taken = self._take()
            if taken:
                self._round(taken)

    def _take(self) -> dict[str, Request]:
        store, found = self._served.store, {}
        for job in store.jobs.page(states=[JobState.VALIDATING], limit=1000):
            set_state(store, job.id, JobState.RUNNING)
            self._logs[job.id] = (RequestLog(self._served.home.job(job.id)), 1)
        for job_id, (log, number) in self._logs.items():
            if log.state(number) == "waiting":
                found[job_id] = log.read_request(number)
        return found

    def _round(self, taken: dict[str, Request]) -> None:
        rows = [request.arrays["targets"] for request in taken.values() if request.has_sequences]
        time.sleep(ROUND_S + sum(map(len, rows)) / TOKENS_PER_S)
        for job, request in taken.items():
            log, number = self._logs[job]
            log.write_answer(number, _answer(request))
            self._logs[job] = (log, number + 1)
        self.rounds += 1
        self.widest = max(self.widest, len(taken))


def _answer(request: Request) -> Answer:
    if request.has_sequences:
        logprobs = np.full(len(request.arrays["targets"]), -1.0, np.float32)
        return Answer(logprobs=logprobs, metrics={"loss:sum": float(len(logprobs))})
    return Answer(metrics={"grad_norm": 1.0}, values={"step": 1})


@contextmanager
def pretending(served: Served) -> Iterator[PretendedGang]:
    gang, ended = PretendedGang(served), threading.Event()
    thread = threading.Thread(target=gang.play, args=(ended,), daemon=True)
    thread.start()
    try:
        yield gang
    finally:
        ended.set()
        thread.join()


def measure_pretended(notes: Figures, folder: Path, plan: tenants.Plan, *, count: int) -> None:
    """Notes steps a second, and how long one takes beyond its two rounds."""
    with (
        serving(folder / "pretending") as served,
        notes.load("tenants: "),
        pretending(served) as gang,
    ):
        tokens = tuple(served.tokens(count))
        cpu_s = served.cpu_s
        done = tenants.run(replace(plan, address=served.address, tokens=tokens))
        cpu_s = served.cpu_s - cpu_s
    what = f"{count} tenants of tinker on a gang that pretends, {plan.think_s:g} s to think"
    took_s = max(step.begin_s + step.took_s for step in done) - done[0].begin_s
    notes.row(f"{what}: steps", len(done) / took_s, "1/s")
    notes.row(f"{what}: jobs in the widest round", gang.widest, "jobs")
    notes.row(f"{what}: CPU of the server for a step", 1e3 * cpu_s / len(done), "ms")
    least_s = 2 * ROUND_S + plan.sequences * plan.length / TOKENS_PER_S
    notes.spread(f"{what}: step beyond two rounds", [step.took_s - least_s for step in done])


_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Tenants on a service, and for how long they work."""

    name: str
    """Name of the base, for the rows."""
    base: Path
    gpus: int
    """0: one process on the CPU."""
    count: int
    alone: int
    """Tenants that are measured alone; the ranks go round, so four stand for all."""
    together_s: float
    alone_s: float
    plan: tenants.Plan
    hardware: str | None = None
    """Profile for the planner; None: that of the machine."""
    must: float | None = None
    """Least throughput together over that of one alone."""


def measure_fused(notes: Figures, folder: Path, load: Load) -> None:
    """Notes both throughputs and their ratio."""
    with serving_live(folder / "fused", load) as (served, process), notes.load(f"{load.name}: "):
        tokens = served.tokens(load.count)
        together = _train(served, load, tokens, 0, load.together_s)
        _clear(served.store)
        lonely = []
        for number in range(load.alone):
            lonely.append(_train(served, load, tokens[number : number + 1], number, load.alone_s))
            _clear(served.store)
        assert process.poll() is None, "the service must run to the end"
    _tell(notes, load, together, lonely)


def _train(
    served: Served, load: Load, tokens: Sequence[str], first: int, seconds: float
) -> list[tenants.Step]:
    """The steps of some tenants within a time that begins when all have made their first."""
    about = {"address": served.address, "tokens": tuple(tokens), "first": first}
    plan = replace(load.plan, seconds=seconds, **about)
    return tenants.run(plan, processes=1 if len(tokens) == 1 else 2)


def _tell(
    notes: Figures, load: Load, together: list[tenants.Step], lonely: list[list[tenants.Step]]
) -> None:
    plan = load.plan
    size = f"{plan.sequences} x {plan.length} tokens a step, {plan.think_s:g} s to think"
    what = f"{load.name}: {load.count} tenants of tinker, {size}"
    fused = throughput(together)
    alone = statistics.mean(map(throughput, lonely))
    notes.row(f"{what}: together", fused, "tokens/s")
    notes.row(f"{what}: alone, mean of {len(lonely)}", alone, "tokens/s")
    notes.row(f"{what}: together over alone in turn", fused / alone, "", least=load.must)
    notes.spread(f"{what}: step together", [step.took_s for step in together])
    notes.spread(f"{what}: step alone", [step.took_s for own in lonely for step in own])
    least = min(Counter(step.tenant for step in together).values())
    notes.row(f"{what}: fewest steps of a tenant", least, "steps")


def throughput(steps: Sequence[tenants.Step]) -> float:
    """Tokens a second while all tenants were there, thinking included."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for step in steps:
        first.setdefault(step.tenant, step.begin_s)
        last[step.tenant] = step.begin_s + step.took_s
    begin_s, end_s = max(first.values()), min(last.values())
    inside = [step for step in steps if begin_s < step.begin_s + step.took_s <= end_s]
    return sum(step.tokens for step in inside) / (end_s - begin_s)


@contextmanager
def serving_live(root: Path, load: Load) -> Iterator[tuple[Served, subprocess.Popen[bytes]]]:
    """`tlora serve --http` over a base, with one gang for all jobs."""
    home, port = Home.open(root), _free_port()
    command = [sys.executable, "-m", "tlora_megatron.cli", "serve", "--service", str(root)]
    command += ["--http", str(port), "--base", f"{BASE}={load.base}", "--policy", "mlora"]
    command += ["--gpus", str(load.gpus or 1)]
    command += ["--hardware", load.hardware] if load.hardware else []
    log = root / "serve.log"
    with log.open("wb") as out, open_store(home.store) as store:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(address, process, log)
            yield Served(home, store, address, psutil.Process(process.pid)), process
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            for part in sorted(root.glob("gangs/*/rank_0.log")):
                print(part, part.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            shutil.rmtree(root, ignore_errors=True)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            httpx.get(f"{address}/", timeout=5)
            return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(
        f"the service must answer within {_PATIENCE_S:.0f} s, got: {log.read_text()}"
    )


def _clear(store: Store) -> None:
    """Cancels the tenants' jobs, and waits until all are over."""
    end_s = time.monotonic() + _PATIENCE_S
    while jobs := [job for job in store.jobs.page(limit=1000) if job.state not in OVER]:
        for job in jobs:
            if job.wish is None:
                store.jobs.request_action(job.id, "cancel")
        assert time.monotonic() < end_s, f"jobs must be over, got {jobs}"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
