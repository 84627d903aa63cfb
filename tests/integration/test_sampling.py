"""OpenAI's own client asks a service on the CPU: bases, an adapter that was trained, errors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from scripts import verify_adapters
from tests.helpers.http_service import BASE, Api, listening, open_api
from tests.helpers.sampling_case import write_adapters
from tests.helpers.scenario import summary_of
from tests.helpers.stored_jobs import finish, put_job, serve_gang, start
from tests.helpers.train_worker import train_until
from tlora_megatron.config.sections import plain
from tlora_megatron.files import write_json
from tlora_megatron.service.home import JOB_NAME, Home, make_folder
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.settings import base_section

QUESTION = 'What is "planet" from back to front?'


class Served(NamedTuple):
    api: Api
    address: str
    mirror: str
    """Id of ann's job."""
    running: str
    """Id of one that has the same checkpoints and has not ended."""
    run: Path
    """Folder of the run that trained it."""
    exact_match: float
    """The result of the evaluation of ann's job."""
    evaluation: list[dict[str, str]]

    def client(self, tenant: str = "ann") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key=self.api.token(tenant), max_retries=0
        )


def add_job(api: Api, tenant: str, name: str, adapter: Path | None) -> str:
    """Adds a job that has ended with an adapter, or one that runs; returns its id."""
    base = plain(asdict(api.service.bases()[BASE]))
    document = {"name": name, "base_model": base}
    job = put_job(api.store, name, tenant, document=document)
    start(api.store, job)
    write_json(make_folder(api.home.job(job)) / JOB_NAME, document)
    if adapter is not None:
        shutil.copytree(adapter, api.home.job(job) / "adapter")
        finish(api.store, job)
    return job


@pytest.fixture(scope="module")
def served(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("sampling")
    out = root / "out"
    summary = train_until(_mirror_alone(repo, root), out)
    job = summary["jobs"]["mirror"]
    rows = (root / "eval.jsonl").read_text().splitlines()
    random = write_adapters(repo / "configs/quickstart/base", root / "random")
    home = Home.open(root / "service")
    sampler = OwnSampler(home.root / "sampler", partial(base_section, home), OwnSettings())
    with open_api(home.root, sampler=sampler) as api, listening(api.app) as address:
        api.service.closers.append(sampler.close)
        serve_gang(api.store, api.home)
        mirror = add_job(api, "ann", "mirror", out / "jobs/mirror/adapter")
        running = add_job(api, "ann", "running", None)
        checkpoints = api.home.job(running) / "checkpoints"
        shutil.copytree(out / "jobs/mirror/checkpoints", checkpoints)
        add_job(api, "bob", "secret", Path(random["everything"]))
        exact_match = job["exact_match_after"]
        evaluation = [json.loads(row) for row in rows]
        yield Served(api, address, mirror, running, out, exact_match, evaluation)


def _mirror_alone(repo: Path, root: Path) -> Path:
    """The quickstart's first job, in one process and for fewer steps."""
    import yaml

    document = yaml.safe_load((repo / "configs/quickstart.yaml").read_text())
    folder = repo / "configs/quickstart"
    (job,) = [job for job in document["jobs"] if job["name"] == "mirror"]
    rows = (folder / "data" / "mirror_eval.jsonl").read_text().splitlines(keepends=True)
    (root / "eval.jsonl").write_text("".join(rows[:32]))
    data = {"train": str(folder / "data" / "mirror_train.jsonl"), "eval": str(root / "eval.jsonl")}
    document |= {
        "base_model": {"path": str(folder / "base")},
        "parallel": {},
        "run": {**document["run"], "checkpoint_every_steps": 30},
        "jobs": [{**job, "data": data, "max_steps": 60, "eval_every_steps": 60}],
    }
    path = root / "mirror.json"
    path.write_text(json.dumps(document))
    return path


def test_adapter_answers_as_its_evaluation_says(served: Served) -> None:
    client, rows = served.client(), served.evaluation
    answer = client.completions.create(
        model="mirror", prompt=[row["prompt"] for row in rows], max_tokens=40, temperature=0
    )
    right = sum(
        choice.text == row["completion"] and choice.finish_reason == "stop"
        for choice, row in zip(answer.choices, rows, strict=True)
    )
    assert 0 < right < len(rows), "neither shows that the two agree"
    assert right / len(rows) == pytest.approx(served.exact_match)
    before = client.completions.create(model=BASE, prompt=rows[0]["prompt"], temperature=0)
    assert before.choices[0].text == "?"


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_script_confirms_its_evaluation_and_denies_another(
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(served.run, tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", "200")
    told = summary_of(run)["jobs"]["mirror"]

    def verify(*words: str, **changes: Any) -> tuple[int, str]:
        change_json(run / "summary.json", jobs={"mirror": told | changes})
        status = verify_adapters.main([str(run), "--device", "cpu", *words])
        return status, capsys.readouterr().out

    status, said = verify("--batch-size", "5")
    assert (status, said.count("yes"), "32 of 32" in said) == (0, 1, True), said
    for column in ("prompt", "expected", "base model says", "adapter says"):
        assert column in said
    status, said = verify(exact_match_after=served.exact_match - 4 / 32)
    assert (status, "not what the run reported: mirror" in said) == (1, True), said
    status, said = verify(adapter=None, status="failed", reason="loss is NaN")
    assert (status, "job mirror has no adapter: failed, loss is NaN" in said) == (1, True), said
    (tmp_path / "texts.jsonl").write_text('{"text": "w5 w6"}\n')
    (job,) = json.loads((run / "config.json").read_text())["jobs"]
    data = job["data"] | {"eval": str(tmp_path / "texts.jsonl")}
    change_json(run / "config.json", jobs=[job | {"data": data}])
    assert "texts.jsonl:1 must hold prompt and completion, got ['text']" in verify()[1]
    change_json(run / "config.json", base_model={"path": None})
    assert "base_model.path must be a Hugging Face directory" in verify()[1]


@pytest.mark.parametrize(("reported", "expected"), [(0.75, (0, 3)), (1.0, (3, 3)), (0.0, (0, 0))])
def test_some_rows_deny_what_they_cannot_belong_to(
    reported: float, expected: tuple[int, int]
) -> None:
    assert verify_adapters.expected_matches(reported, 3, 12, 0.0) == expected


def test_checkpoint_answers_while_its_job_trains(served: Served) -> None:
    client, prompts = served.client(), [row["prompt"] for row in served.evaluation[:12]]

    def answers(model: str) -> list[str]:
        asked = client.completions.create(model=model, prompt=prompts, temperature=0)
        return [choice.text for choice in asked.choices]

    name = f"ft:{BASE}:ann::{served.running}:ckpt-step-"
    assert answers(f"{name}60") == answers("mirror")
    assert answers(f"{name}30") != answers("mirror")


@pytest.mark.parametrize("name", ["mirror", "{id}", "ft:quickstart:ann:x:{id}"])
def test_chat_is_the_completion_of_the_template(served: Served, name: str) -> None:
    client, model = served.client(), name.format(id=served.mirror)
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0
    )
    text = client.completions.create(model=model, prompt=f"{QUESTION}\n", temperature=0)
    assert chat.choices[0].message.content == text.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.model == model
    assert chat.system_fingerprint == text.system_fingerprint
    assert str(chat.system_fingerprint).startswith(f"{served.mirror}@step-")
    assert chat.usage == text.usage
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(QUESTION) + 2


def test_stream_is_the_whole_in_pieces(served: Served) -> None:
    client = served.client()
    asked = {
        "model": "mirror",
        "messages": [{"role": "user", "content": QUESTION}],
        "n": 2,
        "seed": 5,
        "temperature": 1.5,
        "max_completion_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        scored = [e for part in parts if part.logprobs for e in part.logprobs.content]
        assert scored == choice.logprobs.content
        assert all(len(entry.top_logprobs) == 2 for entry in scored)


def test_scores_of_a_text(served: Served) -> None:
    answer = served.client().completions.create(
        model=BASE, prompt=["abc", "de"], max_tokens=0, echo=True, logprobs=1
    )
    first, second = answer.choices
    assert (first.text, first.finish_reason) == ("abc", "length")
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert first.logprobs.token_logprobs is not None
    assert first.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in first.logprobs.token_logprobs[1:])
    assert first.logprobs.tokens is not None
    assert first.logprobs.tokens[1:] == ["a", "b", "c"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": "secret"}, 404, "model must be one of yours"),
        ({"model": "nothing"}, 404, "model must be one of yours"),
        ({"model": "running"}, 400, "of a job that has finished, got 'running'"),
        ({"model": "ft:q:ann::{id}:ckpt-step-3"}, 404, "that is there .*, got 'step 3 of mirror'"),
        ({"temperature": 3}, 400, "temperature is refused"),
        ({"prompt": [[1, 9999]]}, 400, "tokens must be between 0 and 263, got 9999"),
        ({"prompt": "a" * 300}, 400, "shorter than the base's 256 positions, got 301"),
        ({"prompt": []}, 400, "prompt"),
        ({"stop": ""}, 400, "stop"),
        ({"echo": True, "stream": True}, 400, "echo must be false"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_wrong_requests_are_answered_in_openai_s_format(
    served: Served, changes: dict[str, object], status: int, message: str
) -> None:
    wish = {"model": BASE, "prompt": "a", **changes}
    wish["model"] = str(wish["model"]).format(id=served.mirror)
    with pytest.raises(openai.APIStatusError) as caught:
        served.client().completions.create(**wish)  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert re.search(message, caught.value.message)
    assert str(served.api.home.root) not in caught.value.message
