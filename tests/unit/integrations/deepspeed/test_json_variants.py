"""The DeepSpeed JSON files that people have, with a tlora section in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_files import FILES, REFUSED
from tests.helpers.deepspeed_json import load
from tlora_megatron.config.reader import ConfigError


@pytest.mark.parametrize("name", FILES)
def test_it_is_taken_as_it_is(folder: Path, name: str) -> None:
    config = load(folder, FILES[name])
    (job,) = config.run.jobs
    assert job.schedule.name == ("linear" if "WarmupDecayLR" in name else "constant")
    assert (job.schedule.warmup_steps, job.optimizer.lr) == (0, 2e-4), "this package's own"
    assert config.stage == FILES[name]["zero_optimization"]["stage"]
    assert "'auto'" not in str(config.engine)


@pytest.mark.parametrize(("name", "document", "message"), REFUSED)
def test_it_is_refused_by_name(
    folder: Path, name: str, document: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, document)


def test_keys_that_no_deepspeed_reads_are_told(folder: Path) -> None:
    told = "\n".join(load(folder, FILES["LLaMA-Factory, ds_z3_config.json"]).changes)
    assert "comms_config has no effect" in told
    assert "monitor_config has no effect" in told
