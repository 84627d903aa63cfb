"""What the `openai` client sends: files, and jobs as `tlora train` would read them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.helpers.http_service import Api
from tests.unit.service.api.openai.conftest import CHATS, Still
from tlora_megatron.config.job import JobSpec, LoraSpec, PreferenceSpec
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.sections import read_job
from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.api.openai import parts, uploads
from tlora_megatron.service.api.openai.submitting import (
    Asked,
    Start,
    check_request,
    job_entry,
    numbers_of,
)
from tlora_megatron.service.store import TenantLimits


def folder_of(api: Api, tenant: str = "ann") -> Path:
    return api.home.tenant(tenant) / "files"


def test_a_file_comes_and_goes(client: OpenAI, api: Api) -> None:
    made = client.files.create(file=("../../a/chats.jsonl", CHATS), purpose="fine-tune")
    assert (made.filename, made.bytes, made.status) == ("chats.jsonl", len(CHATS), "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.wait_for_processing(made.id) == made
    assert client.files.content(made.id).read() == CHATS
    row = api.store.uploads.get(made.id, tenant="ann")
    assert row.digest == hashlib.sha256(CHATS).hexdigest()
    assert row.facts == {"rows": 3, "kinds": {"messages": 3}}
    assert client.files.delete(made.id).deleted
    assert list(folder_of(api).iterdir()) == []
    with pytest.raises(openai.NotFoundError, match="a file's id must be one of yours"):
        client.files.retrieve(made.id)


def test_lists_have_pages(client: OpenAI) -> None:
    ids = [client.files.create(file=(f"{n}", CHATS), purpose="fine-tune").id for n in range(3)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "it asks for the rest"
    page = client.files.list(limit=2, order="asc")
    assert ([file.id for file in page.data], page.has_more) == (ids[:2], True)
    assert client.files.list(purpose="batch").data == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "a training file must hold at least one line, got none: file"),
        (CHATS + b"{", "a line must be JSON, got .*: file line 4"),
        (CHATS + b"[1]", "a line must be a JSON object, got list: file line 4"),
        (b"[1]\n", "must be JSON lines, as tlora submit .* others, got a JSON array: file"),
        (gzip.compress(CHATS, mtime=0), "must be JSON lines, .* got a gzipped file"),
        (b'{"prompt": "x"}', "a line must hold prompt and completion, or messages, or text"),
        (b'{"text": "\xff"}', "a line must be UTF-8"),
        (b'{"messages": [{"role": "usr", "content": ""}]}', r"messages\[0\].role must be one of"),
        (b'{"messages": [{"role": "user", "content": ""}]}', "must have an answer of weight 1"),
        (
            b'{"messages": [{"role": "assistant", "content": "a", "weight": 2}]}',
            r"messages\[0\].weight must be 0 or 1, got 2",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}',
            r"tools\[0\] must be an object whose function has a name, got 1: file line 1",
        ),
        (b'{"text": ' + b"[" * 100_000, "a line must be JSON"),
    ],
)
def test_what_could_not_be_trained_is_refused_at_once(
    still: Still, content: bytes, told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        still.client.files.create(file=("x.jsonl", content), purpose="fine-tune")
    assert (caught.value.param, caught.value.code) == ("file", "invalid_file")
    assert still.files == []


def test_sizes_have_limits(client: OpenAI, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "LONGEST_LINE", len(CHATS) - 2)
    with pytest.raises(openai.BadRequestError, match="a line must have at most"):
        client.files.create(file=CHATS.replace(b"\n", b" "), purpose="fine-tune")
    monkeypatch.setattr(uploads, "LARGEST_FILE", len(CHATS) - 1)
    with pytest.raises(openai.APIStatusError, match="file must have at most") as caught:
        client.files.create(file=CHATS, purpose="fine-tune")
    assert caught.value.status_code == 413
    monkeypatch.undo()
    api.store.tenants.set_limits("ann", TenantLimits(upload_bytes=2 * len(CHATS) - 1))
    api.service.gate._known.clear()
    client.files.create(file=CHATS, purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="file must have at most") as caught:
        client.files.create(file=CHATS, purpose="fine-tune")
    assert len(list(folder_of(api).iterdir())) == 1


def test_what_a_full_disk_has_cut_does_not_stay(tmp_path: Path) -> None:
    arrival = uploads.Arrival(tmp_path / "file-1", 100, None)
    arrival._file = open("/dev/full", "wb")  # noqa: SIM115
    arrival.write(b"x")
    with pytest.raises(OSError, match="No space left"):
        arrival.close()
    assert not list(tmp_path.iterdir())


def test_a_file_comes_in_parts(client: OpenAI, api: Api) -> None:
    whole = {"file": CHATS, "filename": "../c.jsonl", "bytes": len(CHATS), "part_size": 100}
    md5 = hashlib.md5(CHATS).hexdigest()
    send = client.uploads.upload_file_chunked
    done = send(**whole, mime_type="text/jsonl", purpose="fine-tune", md5=md5)
    assert (done.status, done.filename) == ("completed", "c.jsonl")
    assert done.file is not None
    assert client.files.content(done.file.id).read() == CHATS
    row = api.store.uploads.get(done.file.id, tenant="ann")
    assert (row.digest, row.facts["rows"]) == (hashlib.sha256(CHATS).hexdigest(), 3)
    assert [file.id for file in client.files.list()] == [done.file.id]
    assert [path.name for path in folder_of(api).iterdir()] == [done.file.id]
    again = client.uploads.complete(done.id, part_ids=["x"])
    assert again == done, "an answer that was lost is given again"
    with pytest.raises(openai.BadRequestError, match="upload must be pending, got 'completed'"):
        client.uploads.cancel(done.id)


def test_parts_are_refused_and_given_up(
    client: OpenAI, client_of: Callable[..., OpenAI], api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = {"filename": "c", "mime_type": "text/jsonl", "purpose": "fine-tune"}
    uploads_of, size = client.uploads, len(CHATS)
    for changes, told in (
        ({"purpose": "batch"}, "purpose must be fine-tune"),
        ({"expires_after": {"anchor": "created_at", "seconds": 3600}}, "expires_after must be"),
        ({"bytes": 2**40}, "bytes"),
    ):
        with pytest.raises(openai.BadRequestError, match=told):
            uploads_of.create(**{"bytes": size, **begin, **changes})  # type: ignore[arg-type]
    made = uploads_of.create(bytes=size, **begin)  # type: ignore[arg-type]
    part = uploads_of.parts.create(made.id, data=CHATS[:-1]).id
    with pytest.raises(openai.NotFoundError, match="upload must be one of yours"):
        client_of("bob").uploads.parts.create(made.id, data=b"x")
    for ids, told in (([part], f"hold the {size} bytes"), ([made.id], "parts of the upload")):
        with pytest.raises(openai.BadRequestError, match=told):
            uploads_of.complete(made.id, part_ids=ids)
    broken = uploads_of.parts.create(made.id, data=b"{").id
    with pytest.raises(openai.BadRequestError, match=r"must be JSON, got .*: file line 3"):
        uploads_of.complete(made.id, part_ids=[part, broken])
    assert uploads_of.cancel(made.id).status == "cancelled"
    old = uploads_of.create(bytes=size, **begin).id  # type: ignore[arg-type]
    uploads_of.parts.create(old, data=b"x")
    monkeypatch.setattr(parts, "KEPT_S", -1)
    with pytest.raises(openai.NotFoundError, match="upload must be one of yours"):
        uploads_of.cancel(old)
    uploads_of.create(bytes=1, **begin)  # type: ignore[arg-type]
    assert list(folder_of(api).iterdir()) == [], "what is old goes when another one begins"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"purpose": "batch"}, "purpose must be fine-tune, got 'batch'"),
        ({}, "purpose must be fine-tune, got null"),
        (
            {"purpose": "fine-tune", "expires_after[seconds]": "3600"},
            "expires_after must be left out",
        ),
        (
            {"purpose": "x" * 2000},
            "got Part exceeded maximum size of 1KB",
        ),
    ],
)
def test_fields_of_the_form(still: Still, fields: dict[str, str], told: str) -> None:
    answer = still.api.client().post("/v1/files", data=fields, files={"file": ("x", CHATS)})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert still.files == []


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("application/json", b"{}", "a file must come as multipart/form-data with a boundary"),
        ("multipart/form-data", b"", "a file must come as multipart/form-data with a boundary"),
        ("multipart/form-data; boundary=a", b"garbage", "the body must be multipart/form-data"),
        ("multipart/form-data; boundary=a", b"--a\r\n", "the body must end with its boundary"),
        ("multipart/form-data; boundary=a", b"--a--\r\n", "file must be given"),
    ],
)
def test_bodies_that_are_no_form(still: Still, kind: str, body: bytes, told: str) -> None:
    answer = still.api.client().post("/v1/files", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert still.files == []


def test_lines_are_checked_however_they_are_cut() -> None:
    content = b"\xef\xbb\xbf" + b"\n".join([CHATS.strip(), b"", b'{"text": "x\\u2028"}'])
    for size in (1, 7, 64, len(content)):
        check = uploads.LineCheck("file")
        for begin in range(0, len(content), size):
            check.feed(content[begin : begin + size])
        check.end()
        assert (check.rows, check.kinds) == (4, {"messages": 3, "text": 1})


def spec_of(**body: Any) -> JobSpec:
    asked = Asked(model="base", training_file="file-a", **body)
    check_request(asked)
    entry = job_entry(asked, numbers_of(asked), Start("base"), name="a", train="t", validation=None)
    return read_job(entry, None)


def supervised(**numbers: Any) -> dict[str, Any]:
    return {"type": "supervised", "supervised": {"hyperparameters": numbers}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"hyperparameters": {"n_epochs": "auto", "batch_size": "auto"}},
        {"method": supervised(learning_rate_multiplier="auto")},
        {"method": {"type": "supervised"}, "seed": None, "metadata": None, "integrations": []},
    ],
)
def test_auto_is_a_job_s_default(body: dict[str, Any]) -> None:
    spec = spec_of(**body)
    defaults = read_job({"name": "a", "data": {"train": "t"}, "epochs": 3}, None)
    assert spec == defaults


def dpo(**numbers: Any) -> dict[str, Any]:
    return {"type": "dpo", "dpo": {"hyperparameters": numbers}}


def test_a_method_of_pairs_makes_a_job_of_pairs() -> None:
    spec = spec_of(method={"type": "dpo"}, metadata={"tlora.preference.sft_weight": "0.2"})
    assert spec.preference == PreferenceSpec(beta=0.1, sft_weight=0.2)
    assert (spec.optimizer.lr, spec.epochs) == (1e-5, 3)
    spec = spec_of(method=dpo(beta=0.3, learning_rate_multiplier=2, batch_size="auto"))
    assert spec.preference == PreferenceSpec(beta=0.3)
    assert spec.optimizer.lr == 2e-5


@pytest.mark.parametrize("place", ["hyperparameters", "method", "both"])
def test_numbers_from_either_place(place: str) -> None:
    numbers = {"n_epochs": 2, "batch_size": 5, "learning_rate_multiplier": 0.5}
    body: dict[str, Any] = {}
    if place != "method":
        body["hyperparameters"] = numbers
    if place != "hyperparameters":
        body["method"] = supervised(**numbers)
    spec = spec_of(**body, seed=7)
    assert (spec.epochs, spec.batch_size, spec.optimizer.lr, spec.seed) == (2, 5, 1e-4, 7)


def test_metadata_set_what_the_api_has_no_field_for() -> None:
    metadata = {
        "tlora.lora.rank": "4",
        "tlora.lora.alpha": "8",
        "tlora.lora.target_modules": "q_proj, v_proj",
        "tlora.lora.use_rslora": "true",
        "tlora.lora.expert_rank": "2",
        "tlora.lora.expert_sharing": "outer",
        "tlora.optimizer.lr": "1e-3",
        "tlora.schedule.name": "cosine",
        "tlora.max_steps": "12",
        "tlora.max_seq_len": "64",
        "tlora.max_slowdown": "2.5",
        "tlora.gpus": "2",
        "team": "a",
    }
    spec = spec_of(metadata=metadata, hyperparameters={"learning_rate_multiplier": 2})
    targets = ("q_proj", "v_proj")
    on_experts = {"expert_rank": 2, "expert_sharing": "outer"}
    assert spec.lora == LoraSpec(
        rank=4, alpha=8.0, target_modules=targets, use_rslora=True, **on_experts
    )
    assert (spec.optimizer.lr, spec.schedule.name) == (2e-3, "cosine")
    assert (spec.max_steps, spec.epochs, spec.max_seq_len) == (12, None, 64)
    assert (spec.service.max_slowdown, spec.service.gpus) == (2.5, 2)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"method": {"type": "reinforcement"}}, "method.type must be supervised or dpo, got 'rein"),
        ({"method": {"type": ["dpo"]}}, "method.type must be supervised or dpo, got ..dpo"),
        ({"method": dpo(beta=0)}, "method.dpo.hyperparameters.beta must be auto, or a number"),
        ({"metadata": {"tlora.preference.loss": "orpo"}}, "method.type must be dpo with metadata"),
        ({"method": {"type": "supervised", "dpo": {"a": 1}}}, "method.dpo must be left out"),
        (
            {"method": supervised(beta=1)},
            "method.supervised.hyperparameters must hold n_epochs, batch_size",
        ),
        (
            {"method": supervised(n_epochs=1), "hyperparameters": {"n_epochs": 2}},
            "hyperparameters must be left out, or equal those of method.supervised",
        ),
        ({"integrations": [{"type": "wandb"}]}, "integrations must be left out"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs must be auto, or an"),
        ({"method": supervised(batch_size=-1)}, "supervised.hyperparameters.batch_size must be"),
        (
            {"hyperparameters": {"learning_rate_multiplier": float("nan")}},
            "learning_rate_multiplier must be auto, or a number above 0",
        ),
        ({"suffix": "a:b"}, "suffix must be at most 64 letters"),
        ({"suffix": "../a"}, "suffix must be at most 64 letters"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"metadata": {"tlora.lora.rnak": "4"}}, "did you mean lora.rank"),
        ({"metadata": {"tlora.name": "x"}}, "metadata.tlora.name is not a known key"),
        ({"metadata": {"tlora.lora.rank": "0"}}, "metadata.tlora.lora.rank must be at least 1"),
        ({"metadata": {"tlora.gpus": "two"}}, "metadata.tlora.service.gpus must be an integer"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata must have at most 16 keys"),
        ({"metadata": {"k" * 65: ""}}, "must have a key of at most 64 characters"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k must have at most 512 characters"),
    ],
)
def test_refusals(body: dict[str, Any], told: str) -> None:
    with pytest.raises((ApiError, ConfigError), match=told):
        spec_of(**body)
