"""Over a base in FP8, in every layout, a job gets what PEFT gives it alone over the same base."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.fake_quant_peft import FakeQuant
from tests.helpers.fp8_folders import put_codes
from tests.helpers.oracle import OracleResult
from tests.helpers.scenario import exported, load_scenario, losses, make_scenario, oracle_results
from tests.helpers.scenario_worlds import Case, World, entry, layout_params, run_cases, worlds
from tests.helpers.wide_floats import wide_floats

WORKER = Path(__file__).parents[1] / "helpers" / "wide_floats.py"
JOBS: tuple[dict[str, Any], ...] = (
    {"name": "attention", "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
     "batch_size": 1, "optimizer": {"lr": 4e-3, "max_grad_norm": 0.5, "weight_decay": 0.1}},
    {"name": "mlp", "lora": {"rank": 6, "alpha": 9, "target_modules": ["gate_proj", "up_proj"]},
     "batch_size": 4, "optimizer": {"lr": 2e-3}, "schedule": {"name": "cosine", "warmup_steps": 2}},
    {"name": "blocks",
     "lora": {"rank": 8, "alpha": 16, "parametrization": "block_diagonal", "num_blocks": 4,
      "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj"]}, "batch_size": 3,
     "optimizer": {"lr": 2e-3, "max_grad_norm": 0.3}},
)  # fmt: skip
"""None adapts the down projection."""
WIDE = ("embed_tokens", "lm_head", "layers.0", "down_proj")
"""Linears that `partly` leaves as they are."""
NAMES = tuple(job["name"] for job in JOBS)
IN_BLOCKS: dict[str, int] = {
    "hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 256,
}  # fmt: skip
TP2, SP = ("parallel.tp_size=2",), ("parallel.sequence_parallel=true",)
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "one process": ("run.micro_batch_tokens=104",),
        "selective recompute": ("run.recompute=selective",),
        "full recompute": ("run.recompute=full",),
        "partly": (f"base_model.unquantised=[{', '.join(WIDE)}]",),
    },
    2: {
        "TP2 fold": (*TP2, "parallel.lora_sharding=fold"),
        "TP2 rank_exchange": (*TP2, "parallel.lora_sharding=rank_exchange"),
        "TP2+SP s_lora": (*TP2, *SP, "parallel.lora_sharding=s_lora", "run.recompute=full"),
        "TP2+SP nano-batches": (*TP2, *SP, "run.nano_batches=2"),
        "PP2": ("parallel.pp_size=2", "run.recompute=selective"),
        "TP2+SP fold, codes": (*TP2, *SP, "parallel.lora_sharding=fold"),
        "TP2+SP rank_exchange, codes": (*TP2, *SP, "parallel.lora_sharding=rank_exchange"),
        "TP2+SP nano-batches, codes": (*TP2, *SP, "run.nano_batches=2", "run.recompute=selective"),
    },
}
CODES = "codes"
"""Layouts without block-diagonal jobs: x of column-parallel linears is gathered as codes."""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    return make_scenario(root, JOBS, num_steps=5, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def run_world(scenario: Path) -> World:
    config = json.loads(scenario.read_text())
    standard = scenario.with_name("standard.json")
    standard.write_text(json.dumps(config | {"jobs": config["jobs"][:2]}))

    def cases(size: int) -> dict[str, Case]:
        return {
            name: Case(
                standard if CODES in name else scenario, ("base_model.quantization=fp8", *sets)
            )
            for name, sets in LAYOUTS[size].items()
        }

    return worlds(scenario.parent, cases, worker=WORKER)


@pytest.fixture(scope="module")
def oracles(scenario: Path) -> dict[str, dict[str, OracleResult]]:
    """Each job alone over the bases that layouts have."""
    config = load_scenario(scenario, output_dir=scenario.parent / "unused")
    bases = {
        "whole": FakeQuant(),
        "halves": FakeQuant(tp_size=2),
        "partly": FakeQuant(unquantised=WIDE),
    }
    with wide_floats():
        return {name: oracle_results(config, base) for name, base in bases.items()}


@pytest.mark.parametrize(("world_size", "layout"), layout_params(LAYOUTS))
def test_losses_and_weights_equal_the_oracle(
    layout: str, output_dir: Path, oracles: dict[str, dict[str, OracleResult]], scenario: Path
) -> None:
    base = layout if layout in oracles else "halves" if "TP2" in layout else "whole"
    for name in NAMES[:2] if CODES in layout else NAMES:
        expected = oracles[base][name]
        assert losses(output_dir, name) == pytest.approx(expected.losses, rel=1e-12), name
        factors = exported(output_dir, name, scenario.parent / "base")
        assert factors.keys() == expected.factors.keys(), name
        for key, value in expected.factors.items():
            torch.testing.assert_close(factors[key], value.float(), rtol=1e-6, atol=1e-9)


def test_a_published_base_in_blocks_equals_the_oracle(tmp_path: Path) -> None:
    """Blocks of weights and groups of activations, of 128; scales that are stored in bf16."""
    config = make_scenario(tmp_path, JOBS[:2], num_steps=3, dtype=torch.bfloat16, **IN_BLOCKS)
    published = shutil.copytree(tmp_path / "base", tmp_path / "published")
    put_codes(published, "fp8_bf16")
    base = FakeQuant(blocks_of=str(published), unquantised=("layers.1.down_proj",))
    loaded = load_scenario(config, output_dir=tmp_path / "unused")
    with wide_floats():
        oracle = oracle_results(loaded, base)
    life = entry(config, tmp_path / "out", [f"base_model.path={published}"])
    run_cases(1, [life], tmp_path / "cases.json", worker=WORKER)
    for name, expected in oracle.items():
        assert losses(tmp_path / "out", name) == pytest.approx(expected.losses, rel=1e-12), name


def test_bases_and_jobs_move(oracles: dict[str, dict[str, OracleResult]], scenario: Path) -> None:
    config = load_scenario(scenario, output_dir=scenario.parent / "unused")
    bases = {**oracles, "unquantised": oracle_results(config)}
    for name in NAMES:
        first = [base[name].losses[0] for base in bases.values()]
        assert first == pytest.approx(first[:1] * len(first), rel=2e-2)
        assert all(abs(a / b - 1) > 1e-5 for a, b in itertools.combinations(first, 2))
        moved = [
            value for key, value in oracles["whole"][name].factors.items() if key.endswith("lora_b")
        ]
        assert all(float(factor.abs().max()) > 2e-3 for factor in moved), name  # begun at zero


FP8 = "base_model.quantization=fp8"


def test_a_job_keeps_to_its_codes(tmp_path: Path) -> None:
    config = make_scenario(tmp_path, [JOBS[1]], num_steps=4)

    def train(ranks: int, steps: int, *sets: str, out: str = "out") -> str:
        values = [f"jobs.mlp.max_steps={steps}", "jobs.mlp.schedule.name=constant", *sets]
        return run_cases(ranks, [entry(config, tmp_path / out, values)], tmp_path / "cases.json")

    adapter, checkpoints = (tmp_path / "out/jobs/mlp" / n for n in ("adapter", "checkpoints"))
    train(1, 4, FP8)
    assert "one scale an output channel" in (adapter / "README.md").read_text()
    state = json.loads((checkpoints / "step_00000004/state.json").read_text())
    train(2, 6, FP8, "parallel.tp_size=2")
    later = json.loads((checkpoints / "step_00000006/state.json").read_text())
    assert state["quantisation"] == later["quantisation"]
    with pytest.raises(AssertionError, match=r"quantization must be fp8 .* got null .bf16 or fp32"):
        train(1, 8, f"jobs.mlp.resume_from={checkpoints}", out="other")
    log = train(1, 8, "base_model.allow_change=true")
    assert len(losses(tmp_path / "out", "mlp")) == 8, log
    assert not (adapter / "README.md").exists()
