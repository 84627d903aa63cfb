"""Archives of adapters and checkpoints: whole, in ranges, without links, for their tenant alone."""

from __future__ import annotations

import io
import json
import zipfile

import pytest

from tests.helpers.http_service import BASE, Api
from tests.helpers.stored_jobs import finish, put_job, serve_gang, start
from tlora_megatron.service.api.native import archives
from tlora_megatron.service.home import make_folder


@pytest.fixture
def job(api: Api) -> str:
    """A finished job of ann's with an adapter, a checkpoint, and a link that has no business."""
    job = put_job(api.store)
    serve_gang(api.store, api.home)
    start(api.store, job)
    finish(api.store, job)
    adapter = make_folder(api.home.job(job) / "adapter")
    base = str(api.service.bases()[BASE].folder)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (adapter / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 40)
    (adapter / "link.json").symlink_to("/etc/passwd")
    saved = make_folder(api.home.job(job) / "checkpoints/step_00000005")
    for name in ("adapter.safetensors", "optimizer.safetensors", "state.json"):
        (saved / name).write_text(f"{api.home.tenant('ann')}/files/file-1")
    make_folder(api.home.job(job) / "checkpoints/step_00000006")
    return job


def test_an_adapter_is_sent_whole_and_in_ranges(api: Api, job: str) -> None:
    client = api.client()
    whole = client.get(f"/v1/jobs/{job}/adapter.zip")
    assert whole.status_code == 200, whole.text
    assert 'filename="a-adapter.zip"' in whole.headers["content-disposition"]
    with zipfile.ZipFile(io.BytesIO(whole.content)) as archive:
        assert archive.namelist() == ["adapter_config.json", "adapter_model.safetensors"]
        assert json.loads(archive.read("adapter_config.json")) == {"base_model_name_or_path": BASE}
        assert archive.read("adapter_model.safetensors") == bytes(range(256)) * 40
    parts = [
        client.get(f"/v1/jobs/{job}/adapter.zip", headers={"Range": f"bytes={span}"})
        for span in ("0-999", "1000-")
    ]
    assert [part.status_code for part in parts] == [206, 206]
    assert b"".join(part.content for part in parts) == whole.content


def test_checkpoints_are_listed_and_sent(api: Api, job: str) -> None:
    client = api.client()
    (row,) = client.get(f"/v1/jobs/{job}/checkpoints").json()["checkpoints"]
    assert row["step"] == 5, "the other one is not whole"
    content = client.get(f"/v1/jobs/{job}/checkpoints/5.zip").content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("state.json") == b"file-1"
    for step in ("6", "7", "-1", "99999999999999999999", "%2e%2e"):
        status = client.get(f"/v1/jobs/{job}/checkpoints/{step}.zip").status_code
        assert status in (400, 404), step


def test_they_are_a_tenant_s_own_and_only_of_what_has_ended(api: Api, job: str) -> None:
    for path in ("adapter.zip", "checkpoints", "checkpoints/5.zip"):
        assert api.client("bob").get(f"/v1/jobs/{job}/{path}").status_code == 404
    put_job(api.store, "b")
    refused = api.client().get("/v1/jobs/b/adapter.zip")
    assert refused.status_code == 409
    assert "job 'b' must be finished to have an adapter, got 'validating at step 0'" in refused.text


def test_archives_do_not_pile_up(api: Api, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_KEPT", 2)
    client = api.client()
    for text in ("one", "two", "three", "four"):
        (api.home.job(job) / "adapter/notes.txt").write_text(text)
        client.get(f"/v1/jobs/{job}/adapter.zip")
    assert len(list((api.home.root / "cache/archives").iterdir())) == 2
