"""One process's own configuration: its replica, its speed, and its recompute."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.layout_sites import SPEC
from tests.helpers.planner_case import H200, LLAMA_8B, shipped
from tests.helpers.scenario import make_scenario
from tlora_megatron.config.load import load_config
from tlora_megatron.config.reader import read_spec
from tlora_megatron.config.schema import ParallelSpec, RunConfig, RunSpec
from tlora_megatron.config.sections import expand_short_form
from tlora_megatron.model.backbone import LinearShape, LinearsSpec
from tlora_megatron.model.layout import (
    RECOMPUTES,
    Deployment,
    ParallelLayout,
    RecomputeTable,
    ReplicaLayout,
)
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.choices import replica_rate
from tlora_megatron.planner.deploy_sampled import teams_of
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime import choices
from tlora_megatron.runtime.backbone import (
    OwnReplica,
    check_replicas_fit,
    log_replicas,
    own_replica,
)
from tlora_megatron.runtime.choices import choose_recompute, rate_of_shape, rate_of_team


def own(form: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> OwnReplica:
    deployment = Deployment.parse(form)
    monkeypatch.setenv("WORLD_SIZE", str(deployment.world_size))
    monkeypatch.setenv("RANK", str(rank))
    return own_replica(_config(form))


def _config(form: str) -> Any:
    raw = {"replicas": expand_short_form(form, "replicas")}
    return SimpleNamespace(
        parallel=read_spec(ParallelSpec, raw, "parallel"),
        run=RunSpec(output_dir="out", recompute="selective"),
    )


def test_a_process_sees_its_own_sizes_and_the_number_of_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = "1xTP2+SP@64/full + 2xPP2"
    first, last = (own(form, rank, monkeypatch) for rank in (1, 5))
    assert first.layout == ParallelLayout(tp_size=2, sequence_parallel=True, dp_size=3)
    assert (first.recompute, last.recompute) == ("full", "selective")
    assert last.layout == ParallelLayout(pp_size=2, dp_size=3)
    assert first.deployment == last.deployment == Deployment.parse(form)


def test_alike_replicas_are_no_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own("3xTP1", 1, monkeypatch) == OwnReplica(ParallelLayout(dp_size=3), None, "selective")


@pytest.mark.parametrize(
    ("form", "hidden_size", "quantisation", "message"),
    [
        ("1xTP3 + 1xTP1", 24, None, "num_heads must be a multiple"),
        ("1xTP1 + 1xPP3", 24, None, "num_layers must be a multiple of pp_size=3, got 4"),
        ("1xTP4 + 1xTP1", 26, None, "hidden_size must be a multiple of 4"),
        ("1xTP2 + 1xTP1", 24, object(), "parallel.replicas must have one tp_size over an FP8 base"),
    ],
)
def test_layouts_that_do_not_divide_the_model_are_refused_on_every_process(
    form: str, hidden_size: int, quantisation: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = dataclasses.replace(SPEC, hidden_size=hidden_size)
    for rank in range(Deployment.parse(form).world_size):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_replicas_fit(spec, quantisation, own(form, rank, monkeypatch))


def test_the_log_says_which_replica_is_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tlora_megatron")
    groups: Any = SimpleNamespace(deployment=Deployment.parse("1xTP2@64 + 1xTP1"), is_writer=True)
    log_replicas(groups)
    assert "replica 0 is 1xTP2@64 on processes 0 to 1" in caplog.text
    assert "replica 1 is 1xTP1 on process 2" in caplog.text
    assert "2 replicas of 2 layouts sum adapters in cells of 1/2 of the columns" in caplog.text


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("machine", ["h200", "h100", "l40s"])
def test_the_shape_says_what_profiles_say(recompute: str, machine: str) -> None:
    """Among alike replicas only the share of attention counts."""
    lengths = LengthHistogram.from_counts([(300, 10), (2000, 4), (16384, 1)])
    job = JobLoad(name="a", rank=16, batch_size=64, lengths=lengths)
    plan = Plan(micro_batch_tokens=16384, recompute=recompute)  # type: ignore[arg-type]
    profile = shipped(machine)
    measured = replica_rate(LLAMA_8B, [job], plan, profile)
    counted = rate_of_shape(
        LLAMA_8B,
        ReplicaLayout(micro_batch_tokens=16384, recompute=recompute),  # type: ignore[arg-type]
    )
    ratio = (counted.square_ps / counted.token_ps) / (measured.square_ps / measured.token_ps)
    assert ratio == pytest.approx(1, abs=0.12)
    assert measured.longest == counted.longest == 16384


def test_ranks_share_the_work_and_recompute_adds_to_it() -> None:
    alone = rate_of_shape(LLAMA_8B, ReplicaLayout())
    shared = rate_of_shape(LLAMA_8B, ReplicaLayout(tp_size=2, cp_size=2))
    again = rate_of_shape(LLAMA_8B, ReplicaLayout(recompute="full"))
    assert shared.token_ps == pytest.approx(alone.token_ps / 4, abs=1)
    assert again.token_ps == pytest.approx(1.5 * alone.token_ps, abs=1)
    assert again.square_ps == pytest.approx(4.5 / 3.5 * alone.square_ps, abs=1)


def test_a_model_of_linears_counts_by_its_linears() -> None:
    names = {"q_proj": 64, "up_proj": 128}
    linears = tuple(
        LinearShape(target=name, path=name, out_size=size, in_size=64)
        for name, size in names.items()
    )
    spec = LinearsSpec(num_layers=100, vocab_size=8, max_positions=8, linears=linears)
    rate = rate_of_shape(spec, ReplicaLayout())
    assert rate.token_ps == 2 * 192 * 64 * 2 * 100 // 400
    assert rate.square_ps > 0
    other = LinearsSpec(num_layers=1, vocab_size=8, max_positions=8, linears=linears[1:])
    assert rate_of_shape(other, ReplicaLayout()).square_ps == 0


def test_teams_have_their_share_of_rows_and_pay_for_what_they_exchange() -> None:
    """Short sequences cost more together than alone, by the shape and by the planner."""
    whole = ReplicaLayout(cp_size=4, micro_batch_tokens=65536, recompute="full")
    teams = teams_of(whole)
    assert [team.cp_size for team in teams] == [1, 2, 4]
    assert teams[-1] == whole
    lengths = LengthHistogram.from_counts([(512, 9), (65536, 1)])
    job = JobLoad(name="one", rank=16, batch_size=8, lengths=lengths)
    planned = [
        Plan(cp_size=team.cp_size, micro_batch_tokens=team.micro_batch_tokens, recompute="full")  # type: ignore[arg-type]
        for team in teams
    ]
    by_planner = [replica_rate(LLAMA_8B, [job], plan, H200) for plan in planned]
    for rates in ([rate_of_team(LLAMA_8B, team) for team in teams], by_planner):
        assert [rate.longest for rate in rates] == [16384, 32768, 65536]
        work = [
            rate.sequence_ps(512) * team.cp_size for rate, team in zip(rates, teams, strict=True)
        ]
        assert work == sorted(work)
        assert work[0] < work[-1] < 1.5 * work[0]


def test_long_sequences_cost_the_recompute_that_they_need() -> None:
    lengths = LengthHistogram.from_counts([(512, 9), (16384, 1)])
    job = JobLoad(name="one", rank=16, batch_size=8, lengths=lengths)
    table = RecomputeTable((("none", 4096), ("full", 16384)))
    plans = [Plan(micro_batch_tokens=16384, recompute=recompute) for recompute in RECOMPUTES]
    none, _, full = (replica_rate(LLAMA_8B, [job], plan, H200) for plan in plans)
    found = replica_rate(LLAMA_8B, [job], plans[0], H200, table)
    assert found.sequence_ps(1024) == pytest.approx(none.sequence_ps(1024), rel=0.06)
    assert found.sequence_ps(16384) == pytest.approx(full.sequence_ps(16384), rel=0.02)


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
    monkeypatch.setattr(choices, "_hardware", lambda *_: SimpleNamespace(reserved_bytes=10 * GB))
    sets = [] if asked is None else [f"run.gpu_memory_gb={asked}"]
    config = load_config(scenario, ["run.recompute=auto", *sets])
    assert choices._memory_bytes(config, groups_on("cuda")) == expected
