"""`parallel.lora_sharding` in the file of `--tlora-config`, under Megatron-LM's own trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_megatron_lm import Launch, assert_equals_oracle, launch, root, summary

__all__ = ["launch", "root"]  # fixtures

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]


@pytest.mark.parametrize("sharding", ["rank_exchange", "s_lora"])
def test_losses_and_weights_equal_the_oracle(sharding: str, launch: Launch, root: Path) -> None:
    document = json.loads((root / "jobs.json").read_text())
    config = root / f"{sharding}.json"
    config.write_text(json.dumps({**document, "parallel": {"lora_sharding": sharding}}))
    flags = "--tensor-model-parallel-size 2 --sequence-parallel"
    out, _ = launch(sharding, flags, config=config.name)
    assert summary(out)["run"]["layout"]["lora_sharding"] == sharding
    assert_equals_oracle(out, root)
