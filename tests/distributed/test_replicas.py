"""Replicas of unlike layouts in one world: each job gets what transformers and PEFT give it alone.

All runs of one world size share one set of processes; each is a whole `train_run`, checked by the
files it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.scenario import (
    JOBS,
    assert_run_equals_oracle,
    assert_same_bits,
    assert_unharmed,
    gone_wrong,
    have_same_adapters,
    load_scenario,
    losses,
    make_scenario,
    only_job,
    summary_of,
    take_fingerprint,
)
from tests.helpers.scenario_worlds import (
    Case,
    Life,
    World,
    cases_of,
    entry,
    layout_params,
    live,
    run_cases,
    worlds,
)
from tests.helpers.train_worker import starts
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.run.reading import JobAdmission

NAMES = tuple(job["name"] for job in JOBS)
REPLICAS: Mapping[int, Mapping[str, str]] = {
    3: {"TP2+TP1": "1xTP2@256 + 1xTP1@128", "PP2+TP1": "1xPP2 + 1xTP1/full",
     "CP2+TP1": "1xCP2 + 1xTP1"},
    4: {"TP2SP+PP2": "1xTP2+SP + 1xPP2", "TP2+TP1+TP1": "1xTP2@256/selective + 2xTP1@128"},
}  # fmt: skip
BOTH_TP2 = "parallel.replicas=1xTP2@256 + 1xTP2@128"
OVERRIDES: dict[int, dict[str, tuple[str, ...]]] = {
    size: {name: (f"parallel.replicas={form}",) for name, form in mine.items()}
    for size, mine in REPLICAS.items()
}
OVERRIDES[3]["PP2+TP1"] += ("run.round_depth=auto",)
OVERRIDES[3]["CP2+TP1"] += ("run.round_depth=2",)
OVERRIDES[4] |= {
    "TP2+TP2 s_lora": (BOTH_TP2, "parallel.lora_sharding=s_lora"),
    "TP2+TP2 nano2": (BOTH_TP2, "run.nano_batches=2"),
}
TP2_TP1 = OVERRIDES[3]["TP2+TP1"]
DETERMINISTIC = (*TP2_TP1, "run.deterministic=true", "defaults.portion_tokens=64")
ILL, WATCHED = "mlp", "everything"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_scenario(tmp_path_factory.mktemp("replicas"), num_layers=4)
    take_fingerprint(path.parent / "base")
    return path


@pytest.fixture(scope="module")
def run_world(scenario: Path) -> World:
    return worlds(scenario.parent, lambda size: _cases(scenario, size))


def _cases(scenario: Path, size: int) -> dict[str, Case]:
    cases = cases_of(scenario, OVERRIDES[size])
    if size == 3:
        cases["again"] = Case(scenario, TP2_TP1)
        cases["ill"] = Case(scenario, (*TP2_TP1, *gone_wrong(ILL)))
        cases["watched"] = Case(scenario, DETERMINISTIC)
        cases["watched alone"] = Case(only_job(scenario, WATCHED), DETERMINISTIC)
    return cases


@pytest.mark.parametrize(("world_size", "layout"), layout_params(OVERRIDES))
def test_equals_oracle(output_dir: Path, scenario: Path) -> None:
    assert_run_equals_oracle(output_dir, NAMES, scenario)


def test_a_deployment_repeats_to_the_bit(run_world: World) -> None:
    first, again = (run_world(3) / name for name in ("TP2+TP1", "again"))
    for name in NAMES:
        assert_same_bits(first, again, name)


def test_a_job_gone_wrong_harms_nobody(run_world: World) -> None:
    out = run_world(3)
    assert_unharmed(out / "ill", out / "TP2+TP1", ILL, NAMES)


def test_a_deterministic_job_alone_has_the_bits_of_the_job_in_company(
    run_world: World, scenario: Path
) -> None:
    out = run_world(3)
    assert_run_equals_oracle(out / "watched", NAMES, scenario)
    alone, together = out / "watched alone", out / "watched"
    assert losses(alone, WATCHED) == losses(together, WATCHED)
    assert have_same_adapters(alone, together, WATCHED)
    summary = summary_of(together)
    layout = summary["run"]["deterministic"]["layout"]
    assert layout["replicas"] == summary["run"]["replicas"]


def test_the_run_says_which_replica_is_what(run_world: World) -> None:
    summary = summary_of(run_world(3) / "TP2+TP1")
    assert summary["run"]["replicas"] == "1xTP2@256/none + 1xTP1@128/none"


RESUMED = ("1xTP2 + 1xTP1", "3xTP1", "1xPP2 + 1xTP1", "1xTP2 + 1xTP1")


def test_resumes_in_other_deployments(scenario: Path, tmp_path: Path) -> None:
    lives = []
    for form, stop in zip(RESUMED, (2, 4, 5, None), strict=True):
        overrides = ("run.checkpoint_every_steps=1", f"parallel.replicas={form}")
        until = stop and ("everything", stop)
        lives.append(entry(scenario, tmp_path / "out", overrides, stop=until))
    run_cases(3, lives, tmp_path / "lives.json")
    assert [steps["everything"] for steps in starts(tmp_path / "out")] == [0, 1, 3, 4]
    assert_run_equals_oracle(tmp_path / "out", NAMES, scenario)


def test_a_sequence_that_no_replica_holds_is_refused(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = load_scenario(scenario, "parallel.replicas=1xTP1@64 + 1xTP2@40", output_dir=tmp_path)
    spec = read_model_spec(config.base_model.config_file)
    with pytest.raises(ValueError, match=r"tokens of some replica must be at least \d+"):
        JobAdmission(config, spec, resuming=False).settle()


@pytest.mark.four_processes
def test_resumes_on_fewer_processes_and_back(scenario: Path, tmp_path: Path) -> None:
    lives = (
        Life(3, TP2_TP1, ("everything", 2)),
        Life(2, (), ("everything", 4)),
        Life(2, ("parallel.tp_size=2",), ("everything", 5)),
        Life(3, TP2_TP1, None),
    )
    out = live(scenario, tmp_path, lives, every=1)
    assert [steps["everything"] for steps in starts(out)] == [0, 1, 3, 4]
    assert_run_equals_oracle(out, NAMES, scenario)
