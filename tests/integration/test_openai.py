"""The unmodified `openai` client fine-tunes on the CPU, by `tlora serve --http`; and our client."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.gang_driver import digest
from tests.helpers.launch import REPO
from tests.helpers.served_http import ServedHttp, as_chats, serving_http
from tests.helpers.tiny_tokenizer import TOOLS_TEMPLATE
from tlora_megatron.client import Client
from tlora_megatron.config.load import read_config
from tlora_megatron.runtime import controller
from tlora_megatron.service.store import open_store

QUICKSTART = REPO / "configs" / "quickstart"
BASE = {"dtype": "float32"}
STEPS = 6
METADATA = {
    "tlora.lora.rank": "4",
    "tlora.lora.alpha": "16",
    "tlora.lora.target_modules": "q_proj,v_proj",
    "tlora.max_seq_len": "256",
    "tlora.data.learn": "each",
    "tlora.max_steps": str(STEPS),
    "tlora.optimizer.lr": "1e-3",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHttp]:
    root = tmp_path_factory.mktemp("openai")
    shutil.copytree(QUICKSTART / "base", root / "base")
    (root / "base" / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    base = root / "base.json"
    base.write_text(json.dumps({"base_model": {**BASE, "path": str(root / "base")}}))
    with serving_http(root / "service", root / "serve.log", f"--base=quick={base}") as found:
        yield found


@pytest.fixture(scope="module")
def client(served: ServedHttp) -> Iterator[openai.OpenAI]:
    options: dict[str, Any] = {"api_key": served.token("ann"), "max_retries": 0}
    with openai.OpenAI(base_url=f"{served.address}/v1", **options) as made:
        yield made


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chats")
    found = {}
    for part in ("train", "eval"):
        rows = (QUICKSTART / "data" / f"mirror_{part}.jsonl").read_text().splitlines()[:48]
        found[part] = folder / f"{part}.jsonl"
        found[part].write_text(as_chats(rows))
    called = {"name": "f", "arguments": '{"city": "SF"}'}
    row = {
        "messages": [
            {"role": "user", "content": "SF?"},
            {"role": "assistant", "content": "Warm.", "weight": 0},
            {"role": "user", "content": "Look!"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": called}]},
            {"role": "tool", "content": "20C"},
            {"role": "assistant", "content": "20C."},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    with found["train"].open("a") as file:
        file.write(16 * (json.dumps(row) + "\n"))
    return found


def _upload(client: openai.OpenAI, path: Path) -> str:
    with path.open("rb") as file:
        return client.files.create(file=file, purpose="fine-tune").id


def _trained_by_a_file(served: ServedHttp, job: str, chats: dict[str, Path], output: Path) -> Path:
    """Trains the same values with `tlora train`; returns the adapter."""
    with open_store(served.home.store) as store:
        order = store.jobs.document(job)["order"]["document"]
    entry = {
        "name": "same",
        "data": {"learn": "each", **{name: str(path) for name, path in chats.items()}},
        "lora": {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        "batch_size": 4,
        "max_seq_len": 256,
        "max_steps": STEPS,
        "optimizer": {"lr": 2.0e-3},
        "seed": 7,
        # What the service chose when it read the data.
        "portion_tokens": order["portion_tokens"],
    }
    run = {"output_dir": str(output), "tensorboard": False}
    base = {**BASE, "path": str(served.home.root.parent / "base")}
    document = {"base_model": base, "jobs": [entry], "run": run}
    controller.train_run(read_config(document, output))
    return output / "jobs" / "same" / "adapter"


def _until(served: ServedHttp, look: Callable[[], Any], *states: str) -> Any:
    served.wait_until(lambda: look().status in states, f"state {states}")
    return look()


@pytest.mark.slow
def test_a_job_is_what_tlora_train_trains(
    served: ServedHttp, client: openai.OpenAI, chats: dict[str, Path], tmp_path: Path
) -> None:
    numbers = {"batch_size": 4, "learning_rate_multiplier": 2.0}
    job = client.fine_tuning.jobs.create(
        model="quick",
        training_file=_upload(client, chats["train"]),
        validation_file=_upload(client, chats["eval"]),
        suffix="mirror",
        seed=7,
        method={"type": "supervised", "supervised": {"hyperparameters": numbers}},
        metadata=METADATA,
    )
    jobs = client.fine_tuning.jobs
    ended = _until(served, lambda: jobs.retrieve(job.id), "succeeded", "failed", "cancelled")
    assert ended.status == "succeeded", ended.error
    assert ended.trained_tokens > 0
    assert [model.id for model in client.models.list()] == ["quick", ended.fine_tuned_model]

    metrics = [event for event in jobs.list_events(job.id, limit=100) if event.type == "metrics"]
    losses = [event.data["train_loss"] for event in metrics[::-1] if "train_loss" in event.data]
    assert len(losses) == STEPS
    content = client.files.content(ended.result_files[0]).text
    rows = list(csv.DictReader(content.splitlines()))
    assert [float(row["train_loss"]) for row in rows if row["train_loss"]] == losses
    assert rows[0]["valid_loss"]
    assert rows[-1]["valid_loss"]

    more = METADATA | {"tlora.max_steps": "1"}
    file, model = job.training_file, ended.fine_tuned_model
    next_id = jobs.create(model=model, training_file=file, seed=7, metadata=more).id
    assert _until(served, lambda: jobs.retrieve(next_id), "succeeded", "failed").error is None
    (step,) = [one for one in jobs.list_events(next_id, limit=100) if one.type == "metrics"]
    assert step.data["train_loss"] < losses[0], "it goes on from what was learnt"

    with Client(served.address, served.token("ann")) as mine:
        adapter = mine.adapter(job.id, tmp_path / "adapter")
        steps = [event.row for event in mine.events(job.id) if event.row["kind"] == "step"]
        assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
        assert mine.metrics(job.id)[-1]["step"] == STEPS
        assert mine.job(job.id).state == "finished"
        assert mine.groups()["at"]
        assert mine.cluster()["at"]
        assert mine.decisions(limit=1)
    expected = _trained_by_a_file(served, job.id, chats, tmp_path / "run")
    assert len({digest(path / "adapter_model.safetensors") for path in (adapter, expected)}) == 1


@pytest.mark.slow
def test_a_job_of_pairs(served: ServedHttp, client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    with path.open("w") as file:
        for text in ("ab", "cd", "ef"):
            asked = [{"role": "user", "content": text}]
            answers = [[{"role": "assistant", "content": a}] for a in (text[::-1], text)]
            names = ("preferred_output", "non_preferred_output")
            pair = {"input": {"messages": asked}, **dict(zip(names, answers, strict=True))}
            file.write(json.dumps(pair) + "\n")
    jobs = client.fine_tuning.jobs
    job = jobs.create(
        model="quick",
        training_file=_upload(client, path),
        method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "batch_size": 2}}},
        metadata=METADATA | {"tlora.max_steps": "2"},
    )
    ended = _until(served, lambda: jobs.retrieve(job.id), "succeeded", "failed")
    assert (ended.status, ended.error) == ("succeeded", None)
    assert (ended.method.type, ended.method.dpo.hyperparameters.beta) == ("dpo", 0.2)
    last, first = [one for one in jobs.list_events(job.id, limit=100) if one.type == "metrics"]
    assert first.data["train_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert last.data["rewards/margins"] > 0


@pytest.mark.slow
def test_a_job_is_held_goes_on_and_is_cancelled(
    served: ServedHttp, client: openai.OpenAI, chats: dict[str, Path]
) -> None:
    jobs = client.fine_tuning.jobs
    long = {**METADATA, "tlora.max_steps": "100000"}
    file = _upload(client, chats["train"])
    job = jobs.create(model="quick", training_file=file, metadata=long)
    _until(served, lambda: jobs.retrieve(job.id), "running")
    jobs.pause(job.id)
    _until(served, lambda: jobs.retrieve(job.id), "paused")
    assert jobs.resume(job.id).status in ("queued", "running", "paused")
    _until(served, lambda: jobs.retrieve(job.id), "running")
    served.kill_http()
    with client.with_options(max_retries=8) as patient:
        patient.fine_tuning.jobs.cancel(job.id)
        last = _until(served, lambda: patient.fine_tuning.jobs.retrieve(job.id), "cancelled")
    assert last.fine_tuned_model is None
