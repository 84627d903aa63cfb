"""Which checkpoint's fingerprint a run under Megatron-LM is held to, and in which precision."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tlora_megatron.integrations.megatron_lm.same_model import (
    checkpoint_of_convert,
    precision_of,
    without_quantization,
)


@pytest.fixture(autouse=True)
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's own question whether a folder holds a checkpoint."""

    def checkpoint_exists(folder: Any) -> bool:
        return folder is not None and (Path(folder) / "latest_checkpointed_iteration.txt").exists()

    module = SimpleNamespace(checkpoint_exists=checkpoint_exists)
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(checkpointing=module))
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", module)


def folder(root: Path, name: str, tracker: str) -> str:
    """A folder of checkpoints."""
    (root / name).mkdir()
    (root / name / "latest_checkpointed_iteration.txt").write_text(tracker)
    return str(root / name)


def arguments(load: str | None, pretrained: str | None, **fields: Any) -> argparse.Namespace:
    """Megatron's arguments."""
    return argparse.Namespace(load=load, pretrained_checkpoint=pretrained, **fields)


def test_it_is_the_folder_that_megatron_loads(tmp_path: Path) -> None:
    one, other = folder(tmp_path, "one", "release"), folder(tmp_path, "other", "release\n")
    assert checkpoint_of_convert(arguments(one, other)) == Path(one)
    assert checkpoint_of_convert(arguments(None, other)) == Path(other)
    assert checkpoint_of_convert(arguments(str(tmp_path / "none"), other)) == Path(other)
    assert checkpoint_of_convert(arguments(None, None)) is None


def test_weights_that_were_trained_on_are_not_the_base_s(tmp_path: Path) -> None:
    trained, release = folder(tmp_path, "trained", "100"), folder(tmp_path, "release", "release")
    assert checkpoint_of_convert(arguments(trained, release)) is None
    assert checkpoint_of_convert(arguments(release, None, ckpt_step=100)) is None
    assert checkpoint_of_convert(arguments(release, None, ckpt_step=None)) == Path(release)


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({"bf16": False}, "float32"),
        ({"bf16": True, "fp8_param_gather": False}, "bfloat16"),
        ({"bf16": True, "fp8_param_gather": True}, "fp8"),
    ],
)
def test_the_precision_is_that_of_the_weights(fields: dict[str, Any], precision: str) -> None:
    assert precision_of(arguments(None, None, **fields)) == precision


def test_fp8_is_off_while_the_base_is_scored() -> None:
    config = SimpleNamespace(fp8="hybrid", fp4=None)
    layer = nn.Linear(1, 1)
    layer.config = config  # type: ignore[assignment]
    model: Any = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    model.config = config
    with without_quantization([model]):
        assert config.fp8 is None
    assert (config.fp8, config.fp4) == ("hybrid", None)
