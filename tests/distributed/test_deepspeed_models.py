"""Causal models of several families under DeepSpeed: each job gets what PEFT gives it alone, or
the base is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import may_abort_behind, run_cases, write_config, zero
from tests.helpers.deepspeed_models import (
    APART,
    DENSE_FAMILIES,
    FAMILIES,
    MIXED,
    family_oracle,
    make_family,
    write_untrained,
)
from tests.helpers.oracle import assert_equals_alone
from tests.helpers.scenario import losses
from tests.helpers.scenario_worlds import entry
from tests.helpers.standing_world import forked, world
from tlora_megatron.integrations.deepspeed.discover import model_spec
from tlora_megatron.training.formats.peft import load_adapter

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, zero(0)),
    "DP2 ZeRO-3": (2, zero(3)),
    "TP2 ZeRO-1": (2, zero(1) | {"tensor_parallel": {"autotp_size": 2}}),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for family in FAMILIES:
        root = tmp_path_factory.mktemp(family)
        section = make_family(root, family)
        spec = model_spec(AutoModelForCausalLM.from_pretrained(root / "base"))
        found[family] = (root, section, spec, family_oracle(root, section, spec))
    return found


@pytest.fixture(scope="module")
def run_world(
    families: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    done: dict[str, Path] = {}

    def run(world: str) -> Path:
        if world not in done:
            out = done[world] = tmp_path_factory.mktemp("out")
            size, deepspeed = WORLDS[world]
            entries = []
            for family in _families_of(world):
                root, section, *_ = families[family]
                config = write_config(root / f"{world}.json", deepspeed, section)
                entries.append(entry(config, out / family))
            run_cases(size, entries, out / "cases.json")
        return done[world]

    return run


def _families_of(world: str) -> Sequence[str]:
    """Routed experts are refused under AutoTP."""
    return DENSE_FAMILIES if world.startswith("TP") else FAMILIES


CASES = [(world, family) for world in WORLDS for family in _families_of(world)]


@pytest.mark.parametrize(("world", "family"), CASES)
def test_losses_and_weights_equal_the_oracle(
    world: str, family: str, run_world: Callable[[str], Path], families: dict[str, Any]
) -> None:
    output_dir = run_world(world) / family
    _, _, spec, oracle = families[family]
    for name, expected in oracle.items():
        factors = load_adapter(output_dir / "jobs" / name / "adapter", model=spec).factors
        assert_equals_alone(losses(output_dir, name), factors, expected, f"{family}: {name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_adapters(
    family: str, run_world: Callable[[str], Path], families: dict[str, Any]
) -> None:
    root, _, spec, oracle = families[family]
    base = AutoModelForCausalLM.from_pretrained(root / "base")
    for name in oracle:
        folder = run_world("one process") / family / "jobs" / name / "adapter"
        model = PeftModel.from_pretrained(base, folder)
        held = {n: p for n, p in model.named_parameters() if "lora_" in n}
        ours = load_adapter(folder, model=spec).factors
        assert len(held) == len(ours)
        total = sum(float(value.double().sum()) for value in ours.values())
        assert sum(float(p.double().sum()) for p in held.values()) == pytest.approx(total)
        assert any(bool(torch.any(p)) for n, p in held.items() if "lora_B" in n)
        base = model.unload()


REFUSER = Path(__file__).with_name("deepspeed_isolation_worker.py")


@pytest.mark.parametrize("name", ["one process", "DP2 ZeRO-3"])
def test_families_with_convolutions_are_refused_and_others_taken(name: str, tmp_path: Path) -> None:
    size, deepspeed = WORLDS[name]
    cases = {}
    for family in (*APART, *MIXED):
        for dtype in ("float32", "bfloat16"):
            section = write_untrained(tmp_path, family, dtype)
            cases[f"{family} {dtype}"] = deepspeed | {"tlora": section}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    with may_abort_behind(*(tmp_path / f"{rank}.json" for rank in range(size))):
        run = forked if size == 1 else lambda *words: world(words[0], size, *words[1:])
        run(REFUSER, file, tmp_path)
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size))
    assert all(other == first for other in others)
    for case, why in first.items():
        rule = r"must keep the documents of a micro-batch apart, got" if "lfm2" in case else ""
        assert rule in why, case
        assert bool(why) == bool(rule), (case, why)
