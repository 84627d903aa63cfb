"""What is sent of a job and taken for it: events, metrics, archives, and shared transactions."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.http_service import BASE, Api, bearer, listening
from tests.helpers.launch import HANG_S
from tests.helpers.stored_jobs import finish, put_job, serve_gang, start
from tlora_megatron.service.api.native import archives
from tlora_megatron.service.api.native.history import Following, Listener, last_rows
from tlora_megatron.service.api.service import Changes
from tlora_megatron.service.history import Place
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.store import JobState, Store, StoreFull, open_store


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.native.history._LOOK_S", 0.01)


def _running(api: Api) -> str:
    job = put_job(api.store)
    serve_gang(api.store, api.home)
    start(api.store, job)
    return job


def _step(api: Api, job: str, step: int) -> None:
    with (make_folder(api.home.job(job)) / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 0.5}) + "\n")


def _rows(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_history_is_replayed_and_goes_on_behind_any_event(api: Api) -> None:
    job = _running(api)
    for step in (1, 2):
        _step(api, job, step)
    finish(api.store, job)
    client = api.client()
    whole = client.get(f"/v1/jobs/{job}/events")
    assert whole.headers["content-type"].startswith("text/event-stream")
    rows = _rows(whole.text)[:-1]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2]
    assert rows[-1]["to"] == "finished"
    assert "granted" not in {row.get("event") for row in rows}, "leases are not a tenant's business"
    assert whole.text.endswith("event: end\ndata: {}\n\n")
    ids = [line[4:] for line in whole.text.splitlines() if line.startswith("id: ")]
    told = [part for part in whole.text.split("\n\n") if part.startswith("id: ")]
    for index, place in enumerate(ids[:-1]):
        rest = client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": place})
        assert [p for p in rest.text.split("\n\n") if p.startswith("id: ")] == told[index + 1 :]
    assert client.get(f"/v1/jobs/{job}/events", params={"after": ids[-1]}).status_code == 204
    assert client.get(f"/v1/jobs/{job}/events", params={"after": "x"}).status_code == 400
    assert api.client("bob").get(f"/v1/jobs/{job}/events").status_code == 404
    admin = api.client("root", ("admin",)).get(f"/v1/jobs/{job}/events")
    assert "granted" in {row.get("event") for row in _rows(admin.text)}


def test_another_tenant_s_part_in_a_death_is_not_told(api: Api) -> None:
    job = _running(api)
    why = "rank 1: job 'secret-of-bob' could not read /data/bob.jsonl"
    api.store.jobs.change(job, JobState.QUEUED, release=why, why=why)
    told = api.client().get(f"/v1/jobs/{job}/events", params={"follow": False}).text
    assert "its gang ended or was arranged anew" in told
    assert "secret" not in told
    error = f"job 'a' cannot be prepared: {api.home.root}/jobs/x: disk"
    api.store.jobs.change(job, JobState.FAILED, why=error, error=error)
    shown = api.client().get(f"/v1/jobs/{job}").json()["error"]
    assert shown == "job 'a' cannot be prepared: jobs/x: disk"


def test_numbers_are_read_from_the_end(api: Api, tmp_path: Path) -> None:
    job = _running(api)
    client = api.client()
    assert client.get(f"/v1/jobs/{job}/metrics").json() == {"rows": []}
    for step in range(1, 6):
        _step(api, job, step)
    rows = client.get(f"/v1/jobs/{job}/metrics", params={"tail": 2}).json()["rows"]
    assert [row["step"] for row in rows] == [4, 5]
    long = tmp_path / "long.jsonl"
    line = json.dumps({"step": 1, "text": "x" * 3000})
    long.write_text(f"{line}\n" * 50 + '{"step": 2')
    assert len(last_rows(long, 3)) == 3
    assert len(last_rows(long, 100)) == 50


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_over_a_port_follows_to_the_end(api: Api) -> None:
    job = _running(api)
    _step(api, job, 1)

    async def follow(address: str) -> list[int]:
        steps = []
        headers = bearer(api.token("ann"))
        async with (
            httpx.AsyncClient(timeout=HANG_S) as client,
            client.stream("GET", f"{address}/v1/jobs/{job}/events", headers=headers) as answer,
        ):
            async for row in _events(answer.aiter_lines()):
                if row.get("kind") == "step":
                    steps.append(row["step"])
                    if len(steps) < 4:
                        await asyncio.to_thread(_step, api, job, len(steps) + 1)
                    else:
                        await asyncio.to_thread(finish, api.store, job)
        return steps

    with listening(api.app) as address:
        assert asyncio.run(follow(address)) == [1, 2, 3, 4]


def _listener(token: str = "t") -> Listener:
    return Listener(token, True, lambda row: row)


def test_many_listeners_cost_one_look_and_one_that_lags_loses_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlora_megatron.service.api.native.history._KEPT", 5)
    job = _running(api)
    _step(api, job, 1)
    following = Following(api.store, api.home)

    async def listen(pause_s: float) -> list[int]:
        steps = []
        async for text in following.listen(job, Place(), _listener()):
            rows = _rows(text)
            steps += [row["step"] for row in rows if row.get("kind") == "step"]
            await asyncio.sleep(pause_s)
        return steps

    async def all_at_once() -> tuple[list[list[int]], int]:
        listeners = [asyncio.create_task(listen(0)) for _ in range(20)]
        listeners.append(asyncio.create_task(listen(0.02)))
        await asyncio.sleep(0.3)
        before = following.reads
        for step in range(2, 40):
            await asyncio.to_thread(_step, api, job, step)
        await asyncio.to_thread(finish, api.store, job)
        found = await asyncio.gather(*listeners)
        return found, following.reads - before

    found, reads = asyncio.run(all_at_once())
    assert all(steps == list(range(1, 40)) for steps in found)
    assert 0 < reads <= 40, "not one for each listener"


def test_a_stream_ends_with_its_token(api: Api) -> None:
    job = _running(api)
    made = api.store.tokens.make("ann")
    following = Following(api.store, api.home)

    async def listen() -> str:
        text = ""
        async for part in following.listen(job, Place(), _listener(made.token.id)):
            if not text:
                await asyncio.to_thread(api.store.tokens.revoke, made.token.id)
            text += part
        return text

    async def bounded() -> str:
        return await asyncio.wait_for(listen(), HANG_S)

    assert asyncio.run(bounded()).endswith("event: end\ndata: {}\n\n")


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


def _submit(store: Store, name: str) -> Callable[[], object]:
    return lambda: put_job(store, name)


class _Slow:
    """A change that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> bool:
        self.begun.set()
        return self.go.wait(HANG_S)


async def _together(changes: Changes, calls: list[Callable[[], object]]) -> list[Any]:
    """Makes changes that all wait while the first one takes its time."""
    slow = _Slow()
    first = asyncio.ensure_future(changes.make(slow))
    await asyncio.to_thread(slow.begun.wait, HANG_S)
    rest = [asyncio.ensure_future(changes.make(call)) for call in calls]
    await asyncio.sleep(0)
    slow.go.set()
    assert await first
    return await asyncio.gather(*rest, return_exceptions=True)


def test_a_refusal_takes_back_its_own_part_alone(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes = Changes(store)

        def half() -> None:
            _submit(store, "half")()
            raise ValueError("after all")

        calls = [_submit(store, "a"), half, _submit(store, "b")]
        found = asyncio.run(_together(changes, calls))
        assert [type(value) for value in found] == [str, ValueError, str]
        assert sorted(job.name for job in store.jobs.page()) == ["a", "b"]
        assert [event.kind for event in store.events.after(0)] == ["submitted"] * 2
        changes.close()
        assert asyncio.run(changes.make(lambda: 1)) == 1, "it begins anew"
        changes.close()


def test_a_full_disk_is_told_to_all_whose_changes_it_took(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes = Changes(store)

        def full() -> None:
            raise StoreFull("the disk must have room")

        found = asyncio.run(_together(changes, [_submit(store, "a"), full, _submit(store, "b")]))
        assert [type(value) for value in found] == [StoreFull] * 3
        assert store.jobs.page() == []
        changes.close()


def test_who_has_gone_before_its_turn_changes_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes = Changes(store)

        async def give_up() -> None:
            slow = _Slow()
            first = asyncio.ensure_future(changes.make(slow))
            await asyncio.to_thread(slow.begun.wait, HANG_S)
            second = asyncio.ensure_future(changes.make(_submit(store, "a")))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            slow.go.set()
            await first

        asyncio.run(give_up())
        changes.close()
        assert store.jobs.page() == []


def test_all_that_wait_are_made_in_few_transactions(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        changes, begun = Changes(store), []
        transaction = store.transaction

        def counted() -> Any:
            begun.append(1)
            return transaction()

        store.transaction = counted  # type: ignore[method-assign]
        calls = [_submit(store, f"n{index}") for index in range(200)]
        asyncio.run(_together(changes, calls))
        changes.close()
        assert len(store.jobs.page(limit=1000)) == 200
        assert len(begun) < 10
