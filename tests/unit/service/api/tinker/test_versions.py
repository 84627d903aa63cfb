"""A sampling client has the weights it was made of, whatever is published by their name later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.helpers.fake_vllm import make_app
from tests.helpers.http_service import BASE, Api, listening
from tests.helpers.played_models import PlayedModels
from tests.unit.service.api.tinker.conftest import Played
from tests.unit.service.api.tinker.test_refusals import model, post, session
from tlora_megatron.service.api.submitting import References
from tlora_megatron.service.api.tinker.checkpoints import KEPT_FOR_SAMPLERS
from tlora_megatron.service.api.tinker.sessions import Reaper
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import Server

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def vllm(tmp_path: Path, played: Played) -> Iterator[str]:
    """A server with room for one adapter, so that it reads each of two again and again."""
    with listening(make_app(BASE, "key", max_loras=1)) as address:
        played.api.service.sampler = open_sampler(tmp_path, address)
        yield address


def open_sampler(folder: Path, address: str) -> VllmSampler:
    return VllmSampler(folder, {}.__getitem__, running=Server(address, "key"))


def draw(client: tinker.SamplingClient) -> list[int]:
    """Three tokens: the server counts in steps of as many as the weights have bytes."""
    asked = client.sample(types.ModelInput.from_ints([10]), 1, types.SamplingParams(max_tokens=3))
    return list(asked.result().sequences[0].tokens)


def test_a_client_stays_at_its_version(played: Played, vllm: str, tmp_path: Path) -> None:
    service = played.client()
    learning = service.create_lora_training_client(base_model=BASE, rank=4).result()
    clients = []
    for weights in ("x", "xx", "xxx"):
        played.models.weights = weights
        path = learning.save_weights_for_sampler("latest").result().path
        clients.append(service.create_sampling_client(model_path=path).result())
    for _ in range(2):
        assert [draw(client) for client in clients] == [
            [11, 12, 13], [12, 14, 16], [13, 16, 19],
        ]  # fmt: skip
    # Another process of HTTP goes on with the server that has these adapters.
    played.api.service.sampler = open_sampler(tmp_path, vllm)
    assert [draw(client)[0] for client in clients] == [11, 12, 13]
    (job,) = played.api.store.jobs.page()
    told = [
        played.api.client().get(f"/api/v1/samplers/{client._sampling_session_id}").json()
        for client in clients
    ]
    assert [one["version"] for one in told] == [f"{job.id}@{number}" for number in (1, 2, 3)]


def test_what_clients_sample_from_is_not_deleted(played: Played, vllm: str) -> None:
    service = played.client()
    learning = service.create_lora_training_client(base_model=BASE, rank=4).result()
    played.models.weights = "x"
    path = learning.save_weights_for_sampler("latest").result().path
    first = service.create_sampling_client(model_path=path).result()
    assert draw(first) == [11, 12, 13]
    played.models.weights = "xx"
    for _ in range(2):
        learning.save_weights_for_sampler("latest").result()
    played.rest().delete_checkpoint_from_tinker_path(path).result()
    look(played.api)
    assert draw(first) == [11, 12, 13]
    played.models.weights = "xxx"
    path = learning.save_weights_for_sampler("latest").result().path
    look(played.api)
    assert versions(played.api) == [1, 4]
    second = service.create_sampling_client(model_path=path).result()
    assert (draw(second), draw(first)) == ([13, 16, 19], [11, 12, 13])


def look(api: Api) -> None:
    asyncio.run(Reaper(api.service).look())


def versions(api: Api) -> list[int]:
    """Numbers of the versions of the only job that are on the disk."""
    (job,) = api.store.jobs.page()
    folder = api.home.job(job.id) / "sampler" / ".versions"
    return sorted(int(entry.name) for entry in folder.iterdir())


class Loop:
    """A client that publishes by one name, and samples from each version for itself."""

    def __init__(self, api: Api) -> None:
        self.api, self.client = api, api.client()
        self.models = PlayedModels(api.home, api.store)
        self.session = session(self.client)
        self.model = model(self.client, self.session)
        self.path = f"tinker://{self.model}/sampler_weights/latest"
        self.published = 0

    def publish(self) -> None:
        self.published += 1
        body = {"model_id": self.model, "seq_id": self.published, "path": "latest"}
        assert post(self.client, "save_weights_for_sampler", **body).status_code == 200
        self.models.step()

    def sampler(self, number: int, session_id: str | None = None) -> Any:
        body = {"session_id": session_id or self.session, "sampling_session_seq_id": number}
        return post(self.client, "create_sampling_session", **body, model_path=self.path).json()

    def ask(self, sampler_id: str, seq_id: int) -> Any:
        body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        asked = {**body, "sampling_session_id": sampler_id, "seq_id": seq_id}
        request = post(self.client, "asample", **asked).json()
        return post(self.client, "retrieve_future", request_id=request["request_id"])


@pytest.fixture
def loop(api: Api, tmp_path: Path) -> Iterator[Loop]:
    """A loop over a service with a server that has no adapter in memory for long."""
    with listening(make_app(BASE, "key", max_loras=1)) as address:
        api.service.sampler = open_sampler(tmp_path / "log", address)
        found = Loop(api)
        found.models.weights = "x"
        with found.client:
            yield found


def test_versions_that_were_used_last_stay(loop: Loop) -> None:
    samplers = []
    for number in range(KEPT_FOR_SAMPLERS + 3):
        loop.publish()
        samplers.append(loop.sampler(number)["sampling_session_id"])
        first = loop.sampler(0)["sampling_session_id"]  # a retry stays at its version, too
        time.sleep(0.01)
        assert "error" not in loop.ask(first, number).text
        look(loop.api)
    stay = [1, *range(4, KEPT_FOR_SAMPLERS + 4)]
    assert versions(loop.api) == stay
    told = loop.ask(samplers[1], 100).json()["error"]
    assert "as it was when this sampling client was made" in told
    assert "make a new client" in told
    other = session(loop.client)
    pinned = loop.sampler(0, other)["sampling_session_id"]
    loop.client.post(f"/api/v1/sessions/{loop.session}/finish", json={})
    loop.models.step()
    look(loop.api)
    assert versions(loop.api) == [KEPT_FOR_SAMPLERS + 3], "its name leads there"
    loop.client.delete(f"/api/v1/training_runs/{loop.model}/checkpoints/sampler_weights/latest")
    look(loop.api)
    assert "error" not in loop.ask(pinned, 0).text
    loop.client.post(f"/api/v1/sessions/{other}/finish", json={})
    with loop.api.service.in_use.held(folder_of(loop, KEPT_FOR_SAMPLERS + 3)):
        look(loop.api)
        assert versions(loop.api) == [KEPT_FOR_SAMPLERS + 3], "it is being drawn from"
    look(loop.api)
    assert versions(loop.api) == []


def folder_of(loop: Loop, number: int) -> Path:
    (job,) = loop.api.store.jobs.page()
    return loop.api.home.job(job.id) / "sampler" / ".versions" / f"{number:08d}"


def test_a_job_may_begin_at_a_published_name(loop: Loop) -> None:
    loop.publish()
    (job,) = loop.api.store.jobs.page()
    known = References(loop.api.home, loop.api.store, {}, tenant="ann")
    found = known.folder(f"jobs/{job.id}/sampler/latest", "init_from")
    assert found == str(folder_of(loop, 1))


def test_a_version_that_has_no_name_yet_stays(loop: Loop) -> None:
    loop.publish()
    written = folder_of(loop, 2)
    written.mkdir()
    look(loop.api)
    assert versions(loop.api) == [1, 2]


def test_weights_from_before_there_were_versions_are_sampled_and_replaced(loop: Loop) -> None:
    loop.publish()
    name = folder_of(loop, 1).parent.parent / "latest"
    name.unlink()
    folder_of(loop, 1).rename(name)
    sampler = loop.sampler(0)["sampling_session_id"]
    assert loop.api.store.sessions.sampler(sampler, tenant="ann").version is None
    assert "error" not in loop.ask(sampler, 0).text
    loop.publish()
    assert versions(loop.api) == [2]
    assert name.is_symlink()
