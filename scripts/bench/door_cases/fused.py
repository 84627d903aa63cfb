"""Real tenants of the `tinker` SDK on `tlora serve`: together, and each alone in turn."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from scripts.bench.door_cases import tenants
from scripts.bench.door_cases.notes import Notes
from scripts.bench.door_cases.serving import BASE, Served
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import OVER, Store, open_store

_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The tenants' work, and for how long they do it."""

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
    think_s: float
    sequences: int
    length: int
    hardware: str | None = None
    """Profile for the planner; None: that of the machine."""
    must: float | None = None
    """Least throughput together over that of one alone."""


def measure(notes: Notes, folder: Path, load: Load) -> None:
    """Notes both throughputs and their ratio."""
    with serving_live(folder / "fused", load) as (served, process), notes.load(load.name):
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
    plan = tenants.Plan(
        address=served.address,
        base=BASE,
        tokens=tuple(tokens),
        first=first,
        seconds=seconds,
        think_s=load.think_s,
        sequences=load.sequences,
        length=load.length,
    )
    return tenants.run(plan, processes=1 if len(tokens) == 1 else 2)


def _tell(
    notes: Notes, load: Load, together: list[tenants.Step], lonely: list[list[tenants.Step]]
) -> None:
    size = f"{load.sequences} x {load.length} tokens"
    what = (
        f"{load.name}: {load.count} tenants of tinker, {size} a step, {load.think_s:g} s to think"
    )
    fused = throughput(together)
    alone = statistics.mean(map(throughput, lonely))
    notes.row(f"{what}: together", fused, "tokens/s")
    notes.row(f"{what}: alone, mean of {len(lonely)}", alone, "tokens/s")
    notes.row(f"{what}: together over alone in turn", fused / alone, "", least=load.must)
    notes.spread(f"{what}: step together", [step.took_s for step in together])
    notes.spread(f"{what}: step alone", [step.took_s for own in lonely for step in own])
    least = min(_count(together, tenant) for tenant in {step.tenant for step in together})
    notes.row(f"{what}: fewest steps of a tenant", least, "steps")


def _count(steps: Sequence[tenants.Step], tenant: int) -> int:
    return sum(step.tenant == tenant for step in steps)


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
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=_environment()
        )
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


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


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
