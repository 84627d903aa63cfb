"""Gangs of real ranks on the local engine: to the end, killed, taken up, stopped for too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.gang_driver import digest, quickstart_base
from tests.helpers.gang_worker import LAYOUT, RUN, STEPS, documents
from tests.helpers.real_gang import drive
from tests.helpers.session import ALL_TESTS
from tests.helpers.standing_world import world

KILLS = 50 if ALL_TESTS else 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return drive("plain", tmp_path_factory.mktemp("plain") / "service")


def test_gang_makes_tlora_train_s_adapters(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    assert undisturbed["deaths"] == []
    assert {job: ended["status"] for job, ended in undisturbed["ended"].items()} == {
        "j1": "finished",
        "j2": "finished",
    }
    assert {job: len(losses) for job, losses in undisturbed["losses"].items()} == {
        "j1": STEPS["mirror"],
        "j2": STEPS["ordered"],
    }
    run = RUN | {"output_dir": str(tmp_path / "run"), "tensorboard": False}
    document = {
        "base_model": quickstart_base(),
        "parallel": LAYOUT,
        "run": run,
        "jobs": documents(),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    world("tlora_megatron.cli", 2, "train", tmp_path / "run.yaml")
    trained = [
        digest(tmp_path / "run" / "jobs" / name / "adapter" / "adapter_model.safetensors")
        for name in STEPS
    ]
    assert list(undisturbed["digests"].values()) == trained


def test_killed_ranks_change_no_bit(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    left = KILLS
    for seed in range(2 * KILLS):
        if left <= 0:
            break
        result = drive("killed", tmp_path / str(seed), seed, min(left, 5))
        assert result["digests"] == undisturbed["digests"]
        assert result["losses"] == undisturbed["losses"]
        assert all("SIGKILL" in death["reason"] for death in result["deaths"]), result["deaths"]
        left -= len(result["deaths"])
    assert left <= 0


def test_a_job_younger_than_the_interval_of_checkpoints_does_not_start_over(tmp_path: Path) -> None:
    result = drive("young", tmp_path / "service")
    assert result["from_step"] == result["saved"] > 0


def test_gang_outlives_its_controller(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    result = drive("adopted", tmp_path / "service")
    assert result["digests"] == undisturbed["digests"]
    assert result["losses"] == undisturbed["losses"]
    assert result["deaths"] == []


def test_gang_that_wakes_up_past_its_lease_changes_no_file_that_is_read(tmp_path: Path) -> None:
    result = drive("zombie", tmp_path / "service")
    assert result["last"] == "died"
    assert "nothing was heard of a controller" in result["reason"]
    assert result["changed"] == []


@pytest.mark.skipif(not ALL_TESTS, reason="stands still for a minute; TLORA_ALL_TESTS=1 runs it")
def test_hung_rank_is_named_and_idling_is_not_hanging(tmp_path: Path) -> None:
    result = drive("hung", tmp_path / "service")
    assert "rank 1 on host" in result["reason"]
    assert "does not answer" in result["reason"]
