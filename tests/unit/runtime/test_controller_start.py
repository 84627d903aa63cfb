"""The order in which `tlora train` begins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlora_megatron.config.schema import BaseModelSpec, ParallelSpec, RunConfig, RunSpec
from tlora_megatron.runtime import backbone, controller
from tlora_megatron.training.run.determinism import ENVIRONMENT


class Woken(Exception):
    """The device is about to start."""


def test_variables_are_set_before_the_device_starts(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wake() -> None:
        assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
        raise Woken

    for name in (*ENVIRONMENT, "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(backbone, "wake_device", wake)
    config = RunConfig(
        base_model=BaseModelSpec(config=str(repo / "configs/models/llama-3.1-8b.json")),
        parallel=ParallelSpec(),
        run=RunSpec(output_dir="out", deterministic=True),
        jobs=(),
    )
    with pytest.raises(Woken):
        controller.train_run(config)
