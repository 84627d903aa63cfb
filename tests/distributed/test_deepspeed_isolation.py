"""Under DeepSpeed a job together with others equals the job alone, to the bit.

Whatever the ZeRO stage and the dtype, beside jobs that step at another pace, and beside one whose
updates overflow.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import run_cases, write_config, zero
from tests.helpers.scenario import make_scenario, records, summary_of
from tests.helpers.scenario_worlds import entry
from tests.helpers.session import ALL_TESTS, further

BF16 = {"bf16": {"enabled": True}}
STAGES: dict[str, tuple[dict[str, Any], str]] = {
    **{f"fp32 ZeRO-{stage}": (zero(stage), "float32") for stage in range(4)},
    **{f"bf16 ZeRO-{stage}": (zero(stage) | BF16, "bfloat16") for stage in (1, 3)},
    # The base alone is said to be bf16, as by users who load it so.
    "bf16 base ZeRO-3": (zero(3), "bfloat16"),
    **further(
        {
            "bf16 ZeRO-2": (zero(2) | BF16, "bfloat16"),
            "bf16 base ZeRO-1": (zero(1), "bfloat16"),
        }
    ),
}
HEALTHY = ("attention", "everything", "outputs")
ALONE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(STAGES, HEALTHY), "fp32 ZeRO-1": HEALTHY[:1], "fp32 ZeRO-2": HEALTHY[1:2],
    "bf16 ZeRO-1": HEALTHY[:2], "bf16 ZeRO-2": HEALTHY[2:], "bf16 ZeRO-3": HEALTHY[1:],
    "bf16 base ZeRO-1": HEALTHY[1:2], "bf16 base ZeRO-3": HEALTHY[:1],
}  # fmt: skip
"""Jobs that also train alone: one at stages whose runs together have the bits of another stage.
Stages slice every dtype alike: all three jobs are alone in fp32, each of them in bf16."""
ILL = "mlp"
NUM_STEPS = 4
PORTION = 48
CHANGES: dict[str, dict[str, Any]] = {
    "attention": {"batch_size": 2},
    "everything": {"batch_size": 6},
    "outputs": {"batch_size": 4},
    # Its warm-up makes the rates of the first updates 0, 5e29, 1e30.
    ILL: {"optimizer": {"lr": 1e30}, "schedule": {"name": "constant", "warmup_steps": 2}},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("deepspeed_isolation")
    dropout = dict.fromkeys(CHANGES, 0.1)
    section = json.loads(make_scenario(root, num_steps=NUM_STEPS, dropout=dropout).read_text())
    jobs = {job["name"]: job | CHANGES[job["name"]] for job in section["jobs"]}
    entries = []
    for stage, (deepspeed, dtype) in STAGES.items():
        runs = {"together": list(jobs), **{f"{name} alone": [name] for name in ALONE[stage]}}
        for run, names in runs.items():
            tlora = {
                "base_model": {"path": "base", "dtype": dtype},
                "run": section["run"]
                | {"portion_tokens": PORTION, "micro_batch_tokens": 100}
                | {"deterministic": "ZeRO-3" not in stage},
                "jobs": [jobs[name] for name in names],
            }
            config = write_config(root / f"{stage} {run}.json", deepspeed, tlora)
            entries.append(entry(config, root / stage / run))

    def folder(stage: str) -> Path:
        if not (root / stage).exists():
            run_cases(2, entries, root / "cases.json")
        return root / stage

    return folder


def tensors(output_dir: Path, name: str) -> dict[str, torch.Tensor]:
    folder = output_dir / "jobs" / name / "checkpoints" / f"step_{NUM_STEPS:08d}"
    return load_file(folder / "adapter.safetensors") | load_file(folder / "optimizer.safetensors")


@pytest.mark.parametrize("stage", STAGES)
def test_together_equals_alone_to_the_bit(stage: str, out: Callable[[str], Path]) -> None:
    folder = out(stage)
    for name in ALONE[stage]:
        together, alone = (folder / run for run in ("together", f"{name} alone"))
        assert len([r for r in records(alone, name) if "loss" in r]) == NUM_STEPS
        assert records(together, name) == records(alone, name), name
        ours, expected = tensors(together, name), tensors(alone, name)
        assert ours.keys() == expected.keys()
        assert any(bool(value.any()) for key, value in expected.items() if "lora_b" in key)
        for key, value in expected.items():
            assert torch.equal(ours[key], value), f"{name} {key}"


@pytest.mark.parametrize("stage", STAGES)
def test_the_scenario_mixes_paces_and_an_overflow(stage: str, out: Callable[[str], Path]) -> None:
    folder = out(stage)
    rounds = {name: summary_of(folder / f"{name} alone")["run"]["rounds"] for name in ALONE[stage]}
    expected = {"attention": NUM_STEPS, "everything": 2 * NUM_STEPS}  # three portions in two rounds
    assert all(rounds[name] == expected[name] for name in rounds.keys() & expected.keys())
    skipped = [r for r in records(folder / "together", ILL) if r.get("skipped")]
    assert len(skipped) == NUM_STEPS - 2


def test_stages_give_the_same_bits(out: Callable[[str], Path]) -> None:
    """All that is sliced is elementwise. (GEMM libraries round by where gathered weights lie.)"""
    same = [("fp32 ZeRO-0", "fp32 ZeRO-1"), ("fp32 ZeRO-0", "fp32 ZeRO-2")]
    for stage, other in same + [("bf16 ZeRO-1", "bf16 ZeRO-2")] * ALL_TESTS:
        for name in HEALTHY:
            ours, expected = (tensors(out(one) / "together", name) for one in (other, stage))
            assert all(torch.equal(ours[key], value) for key, value in expected.items()), other
