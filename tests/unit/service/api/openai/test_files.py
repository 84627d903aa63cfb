"""`/v1/files` with the unmodified client: streamed, checked line by line, each tenant's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.helpers.http_service import Api
from tests.unit.service.api.openai.conftest import CHATS, Still
from tlora_megatron.service.api.openai import uploads
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


def test_other_tenants_see_nothing(client_of: Callable[..., OpenAI], file: str) -> None:
    other = client_of("bob")
    assert other.files.list().data == []
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError, match="a file's id must be one of yours"):
            call(file)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "a training file must hold at least one line, got none: file"),
        (CHATS + b"{", "a line must be JSON, got .*: file line 4"),
        (b"[1]\n", "a line must be a JSON object, got list: file line 1"),
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
        (b"[" * 100_000, "a line must be JSON"),
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


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"purpose": "batch"}, "purpose must be fine-tune, got 'batch'"),
        ({}, "purpose must be fine-tune, got null"),
        (
            {"purpose": "fine-tune", "expires_after[seconds]": "3600"},
            "expires_after must be left out",
        ),
        ({"purpose": "x" * 2000}, "a field of a form must have at most 1024 bytes"),
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


@pytest.mark.parametrize("file", ["..", "%2e%2e%2fx", "file-x", "file-results-j1aaaa", "%00", "ä"])
def test_ids_are_no_paths(still: Still, file: str) -> None:
    for path in (f"/v1/files/{file}", f"/v1/files/{file}/content"):
        assert still.api.client().get(path).status_code in (404, 405)


def test_lines_are_checked_however_they_are_cut() -> None:
    content = b"\xef\xbb\xbf" + b"\n".join([CHATS.strip(), b"", b'{"text": "x\\u2028"}'])
    for size in (1, 7, 64, len(content)):
        check = uploads.LineCheck("file")
        for begin in range(0, len(content), size):
            check.feed(content[begin : begin + size])
        check.end()
        assert (check.rows, check.kinds) == (4, {"messages": 3, "text": 1})
