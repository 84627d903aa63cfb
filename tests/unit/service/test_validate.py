"""A submitted job is checked with the sentences of `tlora train`, measured, and read by ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.scenario import make_scenario
from tests.helpers.tiny_tokenizer import ENDLESS_TEMPLATE
from tlora_megatron.channel import LinePipe
from tlora_megatron.config.load import load_config
from tlora_megatron.config.sections import read_job
from tlora_megatron.files import read_json
from tlora_megatron.service.api.openai.uploads import LineCheck
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import JobOrder
from tlora_megatron.service.prepare.submission import (
    PrepareRules,
    Refused,
    Submission,
    Validated,
    read_submissions,
)
from tlora_megatron.service.prepare.worker import serve, validate
from tlora_megatron.service.worker.read_order import order_reader
from tlora_megatron.training.data.job_data import ENTRY_NAME, BatchPlan, load_job_data
from tlora_megatron.training.data.mapped_tokens import MappedSequences
from tlora_megatron.training.data.tokenize import load_tokenizer


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_scenario(tmp_path_factory.mktemp("data"))


@pytest.fixture
def rules(tmp_path: Path) -> PrepareRules:
    return PrepareRules(root=str(Home.open(tmp_path / "service").root), micro_batch_tokens=256)


def _changed(submission: Submission, **fields: Any) -> Submission:
    return replace(submission, document={**submission.document, **fields})


def _valid(outcome: Validated | Refused) -> Validated:
    assert isinstance(outcome, Validated), outcome
    return outcome


def test_a_job_is_measured_and_its_tokens_kept(scenario: Path, rules: PrepareRules) -> None:
    cut = ("jobs[0].max_seq_len=30",)
    submission = read_submissions(scenario, cut).submissions[0]
    found = _valid(validate("j1", submission, rules))
    job = load_config(scenario, cut).jobs[0]
    data = load_job_data(job, load_tokenizer(scenario.parent / "base"), 264)
    rows = [len(s.tokens) - 1 for s in data.train]
    plan = BatchPlan.for_job(job, len(rows))
    assert found.digest == data.fingerprint
    assert (found.num_steps, found.from_step, found.sequences) == (plan.num_steps, 0, len(rows))
    assert (found.epoch_tokens, found.longest_eval) == (
        sum(rows),
        max(len(s.tokens) - 1 for s in data.eval),
    )
    assert found.longest == max(*rows, found.longest_eval)
    assert found.load().lengths.longest == max(rows)
    assert (found.num_truncated, found.num_dropped) == (data.num_truncated, data.num_dropped)
    assert "cut to max_seq_len" in found.notes[0]
    for key in found.tokens.values():
        assert (Home(Path(rules.root)).tokens / key / ENTRY_NAME).is_file()
    accepted = read_job(dict(found.document), None)
    assert accepted == replace(job, portion_tokens=accepted.portion_tokens)
    assert accepted.portion_tokens == 128  # half a micro-batch
    assert Validated.from_json(found.to_json()) == found
    kept = read_json(Home(Path(rules.root)).job("j1") / "job.json")
    assert kept == {"name": job.name, "base_model": submission.base_model, "job": found.document}


def test_a_batch_larger_than_the_data_is_told(scenario: Path, rules: PrepareRules) -> None:
    large = ("jobs[0].batch_size=100000", "jobs[0].max_steps=1", "jobs[0].portion_tokens=64")
    found = _valid(validate("j1", read_submissions(scenario, large).submissions[0], rules))
    name, rows = found.document["name"], found.sequences
    assert found.notes[-1] == (
        f"job {name!r} has a batch_size of 100000 and {rows} rows of data: a step takes each row "
        f"{100_000 / rows:.3g} times"
    )


def test_chats_have_the_tokens_and_warnings_of_tlora_train(
    scenario: Path, rules: PrepareRules, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tools, weights and null contents, taken by the `openai` API's check, too."""
    shutil.copytree(scenario.parent, tmp_path / "run")
    base, config = tmp_path / "run" / "base", tmp_path / "run" / scenario.name
    (base / "chat_template.jinja").write_text(ENDLESS_TEMPLATE)
    called = {"name": "get_weather", "arguments": '{"city": "SF"}'}
    messages = [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "Maybe.", "weight": 0},
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": called}]},
        {"role": "tool", "tool_call_id": "c", "content": "20C"},
        {"role": "assistant", "content": "Yes.", "weight": 1},
    ]
    tools = [{"function": {"name": "get_weather"}}]
    line = json.dumps({"messages": messages, "tools": tools}).encode() + b"\n"
    check = LineCheck("file")
    check.feed(line * 9)
    check.end()
    (tmp_path / "run" / "chats.jsonl").write_bytes(line * 9)
    chats = ("jobs[0].data.train=chats.jsonl", "jobs[0].max_seq_len=256")
    found = _valid(validate("j1", read_submissions(config, chats).submissions[0], rules))
    caplog.clear()
    data = load_job_data(load_config(config, chats).jobs[0], load_tokenizer(base), 264)
    assert found.digest == data.fingerprint
    assert data.train[0].is_target.sum() == len(
        '{"name": "get_weather", "arguments": {"city": "SF"}}Yes.'
    )
    told = [record.getMessage() for record in caplog.records if "no token" in record.getMessage()]
    assert len(told) == 1
    assert "ends 18 answers with no token that stops generation" in told[0]
    assert told[0] in found.notes


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"portion_tokens": 300}, r"portion_tokens of job .* at most the service's micro_batch_t"),
        ({"max_seq_len": 4, "data": {"overlong": "error"}}, r"at most max_seq_len 4 tokens"),
        (
            {"data": {"train": "/nowhere"}},
            r"^jobs\.attention\.data\.train must be an existing file, got '/nowhere'",
        ),
        ({"init_from": "/nowhere"}, r"init_from must be an existing directory"),
        ({"lora": {"target_modules": ["linear_qkv", "shared_expert.up_proj"]}}, r"shared expert"),
        (
            {"lora": {"parametrization": "block_diagonal", "num_blocks": 3, "rank": 6}},
            r"num_blocks",
        ),
    ],
)
def test_a_mistake_is_a_sentence(
    scenario: Path, rules: PrepareRules, fields: Mapping[str, Any], error: str
) -> None:
    submission = read_submissions(scenario).submissions[0]
    merged = {
        key: {**submission.document[key], **value} if isinstance(value, dict) else value
        for key, value in fields.items()
    }
    found = validate("j1", _changed(submission, **merged), rules)
    assert isinstance(found, Refused)
    assert found.job == "j1"
    assert re.search(error, found.error), found.error


def test_longer_than_the_services_micro_batch(scenario: Path, rules: PrepareRules) -> None:
    submission = read_submissions(scenario).submissions[0]
    found = validate("j1", submission, replace(rules, micro_batch_tokens=50))
    assert isinstance(found, Refused)
    assert found.error.startswith("the service's micro_batch_tokens must be at least ")


def test_a_base_that_is_gone_is_named(scenario: Path, rules: PrepareRules) -> None:
    submission = read_submissions(scenario).submissions[0]
    gone = replace(submission, base_model={**submission.base_model, "path": "/gone"})
    found = validate("j1", gone, rules)
    assert isinstance(found, Refused)
    assert found.error.startswith("base_model.path must be an existing directory, got '/gone'")


def test_below_a_data_root_links_lead_nowhere_and_starts_are_copied(
    scenario: Path, rules: PrepareRules, tmp_path: Path
) -> None:
    root = tmp_path / "tenant"
    shutil.copytree(scenario.parent, root)
    rules = replace(rules, data_root=str(root))
    submission = read_submissions(root / "config.json").submissions[0]
    _valid(validate("j1", submission, rules))
    outside = read_submissions(scenario).submissions[0]
    found = validate("j2", replace(outside, base_model=submission.base_model), rules)
    assert isinstance(found, Refused)
    assert "data.train of job" in found.error
    assert "must be a path below" in found.error
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").symlink_to("/etc/passwd")
    found = validate("j4", _changed(submission, init_from=str(root / "adapter")), rules)
    assert isinstance(found, Refused)
    assert "init_from of job" in found.error
    assert "must hold files and no links, got 'adapter_config.json'" in found.error


def test_a_workers_answers_are_lines_even_for_nonsense(
    scenario: Path, rules: PrepareRules, caplog: pytest.LogCaptureFixture
) -> None:
    submission = read_submissions(scenario).submissions[1]
    good = {
        "job": "j1",
        "submission": json.loads(submission.to_json()),
        "rules": json.loads(rules.to_json()),
    }
    bad = {**good, "job": "j2", "submission": {"name": "a"}}
    (there, back), (here, forth) = os.pipe(), os.pipe()
    service = LinePipe(there, forth)
    service.send(good)
    service.send(bad)
    service.hang_up()
    serve(LinePipe(here, back))
    first, second = service.receive()
    assert first["validated"]["job"] == "j1"
    assert second["refused"]["error"].startswith("job 'a' could not be checked: TypeError")


def test_a_driven_job_has_no_data_and_a_guessed_load(scenario: Path, rules: PrepareRules) -> None:
    first = read_submissions(scenario).submissions[0]
    document = {"name": "t", "driven": True, "lora": {"rank": 4}, "max_seq_len": 200}
    submission = replace(first, name="t", document=document)
    found = _valid(validate("j1", submission, rules))
    assert (found.num_steps, found.tokens, found.longest) == (0, {}, 200)
    load = found.load()
    assert load.is_open
    assert load.lengths.pairs == ((50, 0.9), (200, 0.1))
    accepted = read_job(dict(found.document), None)
    assert accepted.driven
    assert accepted.portion_tokens == 128
    longer = validate("j1", _changed(submission, max_seq_len=300), rules)
    assert isinstance(longer, Refused)
    assert "micro_batch_tokens must be at least 300" in longer.error


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
