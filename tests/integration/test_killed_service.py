"""Controllers killed by SIGKILL at random moments, over real gangs of processes on the CPU.

No job is lost, none is trained twice at once, and every adapter has the sha256 of an undisturbed
service. The gangs train on while nobody rules them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.gang_driver import digest
from tests.helpers.standing_world import forked_result
from tests.helpers.store_chaos import check
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import open_store
from tlora_megatron.service.supervisor import ProcessHandle

KILLS = 50 if os.environ.get("TLORA_ALL_TESTS") else 3
STEPS = 30 if KILLS == 3 else 600


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[list[Home]]:
    """Two folders of services; what still lives there in the end is ended."""
    found = [Home.open(tmp_path / name) for name in ("quiet", "disturbed")]
    yield found
    for home in found:
        for path in home.gangs.glob("*/rank_*.pid"):
            ProcessHandle.known_as(path.read_text()).kill()


def _trained(home: Home, kills: int) -> dict[str, str]:
    """Trains all jobs; the controller is killed so many times, if they last so long."""
    found = forked_result("-m", "tests.helpers.killed_controller", home.root, kills, STEPS)
    assert found["rows"] == {f"job{i}": ["finished", None] for i in range(3)}
    return {
        name: digest(home.job(job) / "adapter/adapter_model.safetensors")
        for name, job in found["ids"].items()
    }


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
        check(store)
        for row in store.jobs.page():
            spans = _spans(disturbed, row.id)
            assert spans
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), spans
        lock = store.lock.holder()
        assert lock is not None
        assert lock.epoch > 1, "no controller was killed"
