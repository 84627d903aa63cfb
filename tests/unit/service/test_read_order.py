"""A validated job on a rank: the same sequences, from the cache alone, under its id."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.helpers.scenario import make_scenario
from tlora_megatron.config.load import load_config
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import JobOrder
from tlora_megatron.service.prepare.submission import PrepareRules, Validated, read_submissions
from tlora_megatron.service.prepare.worker import validate
from tlora_megatron.service.worker.read_order import order_reader
from tlora_megatron.training.data.job_data import load_job_data
from tlora_megatron.training.data.mapped_tokens import MappedSequences
from tlora_megatron.training.data.tokenize import load_tokenizer


def test_an_order_is_the_job_as_it_was_accepted(tmp_path: Path) -> None:
    scenario = make_scenario(tmp_path)
    config, home = load_config(scenario), Home.open(tmp_path / "service")
    expected = load_job_data(config.jobs[0], load_tokenizer(tmp_path / "base"), 264)
    submission = read_submissions(scenario).submissions[0]
    rules = PrepareRules(root=str(home.root), micro_batch_tokens=256)
    found = validate("j1", submission, rules)
    assert isinstance(found, Validated)
    order = JobOrder(
        job="j1", name=submission.name, document=found.document, tokens=found.tokens, lease=1
    )
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    (tmp_path / "base" / "tokenizer.json").unlink()
    read = order_reader(config, home.root)
    prepared = read(asdict(order))
    assert isinstance(prepared.data.train, MappedSequences)
    assert prepared.data.fingerprint == expected.fingerprint == found.digest
    assert (prepared.spec.name, prepared.spec.portion_tokens) == ("j1", 128)
    assert prepared.plan.num_steps == found.num_steps
    with pytest.raises(ValueError, match=r"portion_tokens of job 'attention' must be set"):
        read(asdict(replace(order, document={**found.document, "portion_tokens": None})))
    for key in found.tokens.values():
        (home.tokens / key / "tokens.safetensors").unlink()
    with pytest.raises(ValueError, match=r"data\.train of job 'attention' must be a file"):
        read(asdict(order))
