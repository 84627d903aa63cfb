"""The memory that recompute is chosen by: what is asked for, and what is there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.scenario import make_scenario
from tlora_megatron.config.load import load_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.layout import ParallelLayout, RecomputeTable
from tlora_megatron.runtime import recompute_choice
from tlora_megatron.runtime.recompute_choice import choose_recompute

GB = 1e9


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of four small jobs."""
    return make_scenario(tmp_path_factory.mktemp("recompute"))


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def groups_on(device: str) -> Any:
    return SimpleNamespace(layout=ParallelLayout(), device=torch.device(device))


def table(config: RunConfig) -> RecomputeTable | None:
    jobs: Any = [SimpleNamespace(spec=job) for job in config.jobs]
    return choose_recompute(config, groups_on("cpu"), jobs)


def test_a_run_that_names_its_recompute_has_no_table(scenario: Path) -> None:
    assert table(load_config(scenario, ["run.recompute=full"])) is None


def test_nothing_is_computed_again_where_nothing_limits_memory(scenario: Path) -> None:
    config = load_config(scenario, ["run.recompute=auto"])
    assert table(config) == RecomputeTable((("none", config.run.micro_batch_tokens),))


def test_what_is_chosen_is_told_and_what_will_not_fit(
    scenario: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(scenario, ["run.recompute=auto", "run.gpu_memory_gb=0.002"])
    caplog.set_level(logging.INFO)
    found = table(config)
    assert found is not None
    told, warned = (record.getMessage() for record in caplog.records)
    assert told == f"run.recompute: {found.line} (auto: in 0.002 GB of a GPU)"
    most = found.most_rows[-1][1]
    assert warned.startswith(f"run.micro_batch_tokens should be at most {most}, got 256: more rows")


@pytest.mark.parametrize(
    ("asked", "others", "expected"),
    [(None, 5 * GB, 80 * GB), (None, 30 * GB, 60 * GB), (48.0, 5 * GB, 48 * GB)],
    ids=["alone", "beside others", "asked"],
)
def test_memory_is_what_others_leave(
    asked: float | None,
    others: float,
    expected: float,
    scenario: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less than a profile counts for driver and libraries is this run's own."""
    own = 12 * GB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * GB - others - own, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: own)
    monkeypatch.setattr(
        recompute_choice, "_hardware", lambda *_: SimpleNamespace(reserved_bytes=10 * GB)
    )
    sets = [] if asked is None else [f"run.gpu_memory_gb={asked}"]
    config = load_config(scenario, ["run.recompute=auto", *sets])
    assert recompute_choice._memory_bytes(config, groups_on("cuda")) == expected
