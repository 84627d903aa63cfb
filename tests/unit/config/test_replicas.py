"""`parallel.replicas`: what it fills in, and every setting that it refuses by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.config.load import config_to_dict, ignored_settings, load_config, read_config
from tlora_megatron.config.parallel_rules import refuse_replicas
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.layout import Deployment, ParallelLayout, lay_out_world

UNLIKE_TP = "1xTP2+SP@512/full + 2xTP1@128"


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Loads a run of one job with changes: `parallel={...}`, `run={...}` and keys of the job."""
    (tmp_path / "base").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')

    def load(
        replicas: Any, *overrides: str, parallel: Any = None, run: Any = None, **job: Any
    ) -> RunConfig:
        section = dict(parallel or {})
        if replicas is not None:
            section["replicas"] = replicas
        document = {
            "base_model": {"path": "base"},
            "parallel": section,
            "run": {"output_dir": "out", "micro_batch_tokens": 256, **(run or {})},
            "jobs": [{"name": "one", "data": {"train": "a.jsonl"}, "max_steps": 1, **job}],
        }
        path = tmp_path / "run.json"
        path.write_text(json.dumps(document))
        return load_config(path, overrides)

    return load


def test_the_list_the_short_form_and_an_override_say_the_same(load: Any) -> None:
    listed = [
        {"tp_size": 2, "sequence_parallel": True, "micro_batch_tokens": 512, "recompute": "full"},
        {"count": 2, "micro_batch_tokens": 128},
    ]
    short, override = load(UNLIKE_TP), load(None, f"parallel.replicas={UNLIKE_TP}")
    assert load(listed) == short == override
    assert short.parallel.is_unlike
    assert short.longest_sequence == 512
    assert [spec.recompute for spec in short.parallel.replicas] == ["full", "none"]
    assert str(Deployment.from_specs(short.parallel.replicas)) == UNLIKE_TP + "/none"
    assert ignored_settings(short) == ()


def test_what_is_read_reads_back(load: Any, tmp_path: Path) -> None:
    for form in (UNLIKE_TP, "2xTP2@128/full", [{"count": 2, "tp_size": 2, "pp_size": 3}]):
        config = load(form)
        assert read_config(config_to_dict(config), tmp_path) == config


def test_alike_replicas_are_plain_sizes(load: Any) -> None:
    sizes = {"tp_size": 2, "sequence_parallel": True, "cp_size": 3}
    run = {"micro_batch_tokens": 512, "recompute": "full"}
    plain = load(None, parallel=sizes, run=run)
    found = load("1xTP2+SP+CP3@512/full + 3xTP2+SP+CP3@512/full")
    assert (found.run, found.parallel.tp_size) == (plain.run, 2)
    assert not found.parallel.is_unlike
    assert found.longest_sequence == 512
    assert lay_out_world(found.parallel, 24) == lay_out_world(plain.parallel, 24)
    assert isinstance(lay_out_world(found.parallel, 24), ParallelLayout)


def test_budgets_come_from_the_run_where_a_replica_has_none(load: Any) -> None:
    specs = load("1xTP2 + 1xTP1@64", run={"recompute": "selective"}).parallel.replicas
    assert [spec.micro_batch_tokens for spec in specs] == [256, 64]
    assert {spec.recompute for spec in specs} == {"selective"}
    assert load("2xTP2", run={"recompute": "auto"}).run.recompute == "auto"


@pytest.mark.parametrize("form", [UNLIKE_TP, "2xTP1"])
def test_other_numbers_of_processes_are_refused(load: Any, form: str) -> None:
    with pytest.raises(ValueError, match=r"parallel.replicas must take all 8 processes, got "):
        lay_out_world(load(form).parallel, 8)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sizes beside it": (UNLIKE_TP, {"parallel": {"tp_size": 2}},
     "parallel.tp_size must be absent beside parallel.replicas, got 2"),
    "other sizes beside alike ones": ("2xTP2", {"parallel": {"pp_size": 2}},
     "parallel.pp_size must be absent beside parallel.replicas"),
    "nobody": ([], {}, "parallel.replicas must not be empty"),
    "another key": ([{"dp_size": 2}], {}, "parallel.replicas[0].dp_size is not a known key"),
    "s_lora": (UNLIKE_TP, {"parallel": {"lora_sharding": "s_lora"}},
     "parallel.lora_sharding must be auto or fold with replicas of unlike tp_size"),
    "rank_exchange": (UNLIKE_TP, {"parallel": {"lora_sharding": "rank_exchange"}},
     "parallel.lora_sharding must be auto or fold with replicas of unlike tp_size"),
    "block-diagonal": (UNLIKE_TP, {"lora": {"parametrization": "block_diagonal", "num_blocks": 2}},
     "lora.parametrization of job one must be standard with replicas of unlike tp_size "
     "(1xTP2+SP@512/full + 2xTP1@128/none), got 'block_diagonal'"),
    "states in slices": ("1xPP2 + 1xTP1", {"parallel": {"shard_optimizer": True}},
     "parallel.shard_optimizer must be false with unlike replicas"),
    "nano-batches": (UNLIKE_TP, {"run": {"nano_batches": "auto"}},
     "run.nano_batches must be 1 with replicas of unlike tp_size"),
    "deterministic SP": ("1xTP2+SP + 1xTP1", {"run": {"deterministic": True}},
     "parallel.replicas must name no sequence parallelism with run.deterministic"),
    "recompute by rows": ("1xPP2/full + 1xTP1", {"run": {"recompute": "auto"}},
     "run.recompute must be none, selective or full with unlike parallel.replicas, whose memory "
     "differs, got 'auto'; or let each replica name its own"),
    "deterministic CP": ("1xCP2 + 1xTP1", {"run": {"deterministic": True}},
     "parallel.cp_size must be 1 with run.deterministic"),
    "portions": ("1xPP2 + 1xTP1@128", {"portion_tokens": 129},
     "portion_tokens of job one must be at most 128, which every replica's micro-batch holds"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_by_name(load: Any, case: str) -> None:
    form, changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(form, **changes)


def test_alike_tp_keeps_what_unlike_tp_cannot(load: Any) -> None:
    config = load(
        "1xTP2+PP2 + 1xTP2@64",
        parallel={"lora_sharding": "s_lora"},
        run={"nano_batches": 2},
        lora={"rank": 4, "num_blocks": 2, "parametrization": "block_diagonal"},
    )
    assert config.parallel.is_unlike


@pytest.mark.parametrize(
    ("form", "sharding"),
    [("1xTP2 + 2xTP1@128", "fold"), ("1xPP2 + 2xTP1@128", "auto"), ("1xTP2+SP + 1xTP2", "s_lora")],
)
def test_deterministic_runs_have_portions_of_all(load: Any, form: str, sharding: str) -> None:
    config = load(form, run={"deterministic": True, "micro_batch_tokens": 512})
    assert config.parallel.lora_sharding == sharding
    assert config.jobs[0].portion_tokens <= (64 if "@128" in form else 256)


@pytest.mark.parametrize(
    ("parallel", "job", "message"),
    [
        ({"cp_size": 3}, {}, "parallel.cp_size must be a power of two with"),
        ({"cp_size": 2, "pp_size": 2}, {}, "parallel.pp_size must be 1 with"),
        ({"cp_size": 2}, {"portion_tokens": 8}, "portion_tokens of job one must be absent with"),
    ],
)
def test_cp_by_micro_batch_refuses_by_name(
    load: Any, parallel: dict[str, Any], job: dict[str, Any], message: str
) -> None:
    load(None, parallel=parallel, **job)
    parallel = parallel | {"cp_by_micro_batch": True}
    with pytest.raises(ConfigError, match=f"{message} parallel.cp_by_micro_batch"):
        load(None, parallel=parallel, **job)


def test_cp_by_micro_batch_is_of_plain_replicas(load: Any) -> None:
    alone = {"cp_by_micro_batch": True}
    with pytest.raises(ConfigError, match=r"parallel.replicas must be absent with parallel.cp_by"):
        load("1xCP2@512 + 1xTP1@128", parallel=alone)
    config = load(None, parallel=alone, portion_tokens=8)
    assert ignored_settings(config) == ("parallel.cp_by_micro_batch has no effect with cp_size 1",)


def test_other_trainers_refuse_it() -> None:
    refuse_replicas({"tp_size": 2, "cp_by_micro_batch": False}, "DeepSpeed")
    with pytest.raises(ConfigError, match=r"parallel.cp_by_micro_batch must be absent under"):
        refuse_replicas({"cp_by_micro_batch": True}, "DeepSpeed")
    with pytest.raises(ConfigError, match=r"parallel.replicas must be absent under DeepSpeed"):
        refuse_replicas({"replicas": "2xTP1"}, "DeepSpeed")


@pytest.mark.parametrize(
    ("replicas", "parallel", "message"),
    [
        (None, {"last_stage_layers": 2}, "last_stage_layers must be absent where parallel.pp_size"),
        ("1xPP2 + 1xTP2", {"first_stage_layers": 2}, "first_stage_layers must be absent beside"),
    ],
)
def test_sizes_of_stages_need_one_pipeline(
    load: Any, replicas: str | None, parallel: dict[str, Any], message: str
) -> None:
    load("2xPP2", parallel=parallel)
    with pytest.raises(ConfigError, match=f"parallel.{message}"):
        load(replicas, parallel=parallel)
