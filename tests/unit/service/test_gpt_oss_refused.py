"""A base of gpt-oss is refused by name at every API of a service, before a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.scenario import make_scenario
from tests.helpers.tiny_models import tiny_config
from tlora_megatron.config.load import read_gang_config
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.runtime.resident import open_resident
from tlora_megatron.runtime.sampling.opening import open_batcher
from tlora_megatron.runtime.sampling.values import SamplerLimits
from tlora_megatron.service.bases import declare_bases, read_bases
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import PrepareRules, Refused, read_submissions
from tlora_megatron.service.prepare.validate import validate
from tlora_megatron.training.events import Reports

REFUSED = "must not be of model_type gpt_oss yet, got one; train its jobs with tlora train"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a config.json of gpt-oss, and nothing else."""
    folder = tmp_path / "base"
    tiny_config("gpt_oss").save_pretrained(folder)
    return folder


def test_bases_by_name(tmp_path: Path, base: Path) -> None:
    home = Home.open(tmp_path / "service")
    message = "--base must name a base of another model_type than gpt_oss, got .*oss=.*; train"
    with pytest.raises(ConfigError, match=message):
        declare_bases(home, [f"oss={base}"])
    assert read_bases(home) == {}


def test_jobs(tmp_path: Path) -> None:
    job = {"name": "a", "lora": {"target_modules": ["q_proj"]}}
    scenario = make_scenario(tmp_path / "jobs", [job], num_layers=1, model_type="gpt_oss")
    submission = read_submissions(scenario).submissions[0]
    home = Home.open(tmp_path / "service")
    found = validate("j1", submission, PrepareRules(root=str(home.root), micro_batch_tokens=256))
    assert isinstance(found, Refused)
    assert found.error == f"the base of job 'a' in a service {REFUSED}"
    assert not home.tokens.exists() or not any(home.tokens.iterdir())  # no data was read


def test_gangs_and_samplers(tmp_path: Path, base: Path) -> None:
    config = read_gang_config({"base_model": {"path": str(base)}}, tmp_path, output_dir=tmp_path)
    with (
        pytest.raises(ValueError, match=f"the base of a service {REFUSED}"),
        open_resident(config, events=Reports(None, logs=False)),
    ):
        pass
    with pytest.raises(ValueError, match=f"the base of a sampler {REFUSED}"):
        open_batcher({"path": str(base)}, SamplerLimits())
    assert not dist.is_initialized()
