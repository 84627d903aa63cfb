"""A backbone with drawn weights: `base_model.config` is any file; its folder has the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scenario import load_scenario, losses, make_scenario
from tlora_megatron.runtime.controller import train_run


@pytest.fixture(scope="module")
def shape_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario whose base has no weights and whose config.json has another name."""
    config = make_scenario(tmp_path_factory.mktemp("drawn"))
    base = config.parent / "base"
    (base / "model.safetensors").unlink()
    (base / "config.json").rename(base / "shape.json")
    document = json.loads(config.read_text())
    document["base_model"] = {"config": "base/shape.json", "random_init": True, "dtype": "float32"}
    document["jobs"] = [document["jobs"][0] | {"max_steps": 3}]
    config.write_text(json.dumps(document))
    return config


def test_weights_follow_the_seed(shape_only: Path) -> None:
    runs = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        out = shape_only.parent / name
        overrides = (f"base_model.seed={seed}",)
        train_run(load_scenario(shape_only, *overrides, output_dir=out))
        runs[name] = losses(out, "attention")
    assert len(runs["first"]) == 3
    assert runs["again"] == runs["first"]
    assert runs["other"] != runs["first"]
