"""Controllers killed by SIGKILL at random moments, over real gangs of processes on the CPU.

No job is lost, none is trained twice at once, and every adapter has the sha256 of an undisturbed
service. The gangs train on while nobody rules them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.launch import HANG_S, REPO, environment
from tlora_megatron.service.control.intake import asked_of
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import split_submissions
from tlora_megatron.service.processes import Life
from tlora_megatron.service.store import JobState, NewJob, Store, open_store

QUICKSTART = REPO / "configs" / "quickstart"
BASE = {"path": str(QUICKSTART / "base"), "dtype": "float32"}
KILLS = 50 if os.environ.get("TLORA_ALL_TESTS") else 3
STEPS = 30 if KILLS == 3 else 600


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[list[Home]]:
    """Two folders of services; what still lives there in the end is ended."""
    found = [Home.open(tmp_path / name) for name in ("quiet", "disturbed")]
    yield found
    for home in found:
        for path in home.gangs.glob("*/rank_*.pid"):
            Life.known_as(path.read_text()).kill()


def _controller(home: Home) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.killed_controller", str(home.root), "1"],
        env=environment(),
        cwd=REPO,
        stdout=subprocess.DEVNULL,
    )


def _submit(store: Store) -> None:
    jobs = [
        {
            "name": f"job{i}",
            "data": {"train": str(QUICKSTART / "data" / "ordered_train.jsonl")},
            "lora": {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
            "batch_size": 4,
            "max_seq_len": 64,
            "max_steps": STEPS + 5 * i,
            "seed": i,
        }
        for i in range(3)
    ]
    document: dict[str, Any] = {"base_model": BASE, "jobs": jobs}
    store.jobs.submit(
        [
            NewJob(
                name=one.name,
                document=json.loads(one.to_json()),
                base=one.base_key,
                key=one.name,
                schedule=dict(asked_of(one)),
            )
            for one in split_submissions(document, REPO).submissions
        ]
    )


def _is_over(store: Store) -> bool:
    return all(row.state.is_over for row in store.jobs.page())


def _is_validating(store: Store) -> bool:
    return any(row.state is JobState.VALIDATING for row in store.jobs.page())


def _rules(store: Store, process: subprocess.Popen[bytes]) -> bool:
    """True if a controller holds the lock: one that still starts is not worth killing."""
    lock = store.lock.holder()
    return lock is not None and bool(lock.owner) and json.loads(lock.owner)["pid"] == process.pid


def _adapters(home: Home, store: Store) -> dict[str, str]:
    rows = store.jobs.page()
    assert {row.name: (row.state, row.error) for row in rows} == {
        f"job{i}": ("finished", None) for i in range(3)
    }
    files = {row.name: home.job(row.id) / "adapter/adapter_model.safetensors" for row in rows}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def _trained(home: Home, kills: int) -> dict[str, str]:
    """Trains all jobs; the controller is killed so many times while they do."""
    random, end_s = Random(kills), time.monotonic() + HANG_S + 10 * kills
    with open_store(home.store) as store:
        _submit(store)
        process = _controller(home)
        try:
            while not _is_over(store):
                assert time.monotonic() < end_s, store.jobs.page()
                assert process.poll() is None, "a controller must not end by itself"
                time.sleep(random.uniform(0.0, 1.5) if kills else 0.1)
                # Reading the data takes longer than most controllers live: one dies over it.
                busy = kills < KILLS and _is_validating(store)
                if kills and not busy and _rules(store, process) and not _is_over(store):
                    kills -= 1
                    process.kill()
                    process.wait()
                    process = _controller(home)
        finally:
            process.kill()
            process.wait()
        return _adapters(home, store)


def _spans(home: Home, job: str) -> list[tuple[float, float]]:
    """When gangs trained a job, by what they told."""
    spans = []
    for path in home.gangs.glob("*/events.jsonl"):
        begin: float | None = None
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "joined" and event["job"] == job:
                begin = event["at"]
            over = event["kind"] in ("left", "ended") and event["job"] == job
            if begin is not None and (over or event["kind"] in ("stopped", "died")):
                spans.append((begin, event["at"]))
                begin = None
    return sorted(spans)


@pytest.mark.slow
def test_controllers_are_killed_while_gangs_train(homes: list[Home]) -> None:
    quiet, disturbed = homes
    undisturbed = _trained(quiet, 0)
    assert _trained(disturbed, KILLS) == undisturbed
    with open_store(disturbed.store) as store:
        for row in store.jobs.page():
            spans = _spans(disturbed, row.id)
            assert spans
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), spans
        lock = store.lock.holder()
        assert lock is not None
        assert lock.epoch > 1, "no controller was killed"
