"""Samples of the unmodified client, each from the weights that its sampling client was made of."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from tests.helpers.fake_vllm import make_app
from tests.helpers.http_service import BASE, Api, listening
from tests.helpers.played_models import set_state
from tests.helpers.stored_jobs import put_job
from tests.helpers.tinker.raw import Raw
from tests.unit.service.api.tinker.conftest import Played
from tlora_megatron.runtime.sampling.values import Answer, Prompt, Sampled, TokenLogprob
from tlora_megatron.service.api.server import make_app as make_service
from tlora_megatron.service.api.submitting import References
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker import sampling as tinker_sampling
from tlora_megatron.service.api.tinker.checkpoints import KEPT_FOR_SAMPLERS
from tlora_megatron.service.api.tinker.names import BY, Refused
from tlora_megatron.service.api.tinker.protobuf import decode_sample
from tlora_megatron.service.api.tinker.sampling import sweep_samples
from tlora_megatron.service.api.tinker.sessions import Reaper
from tlora_megatron.service.home import held
from tlora_megatron.service.sampling.sampler import (
    Sampler,
    SamplerAway,
    SamplerBusy,
    SamplerUnavailable,
    SamplingRefused,
)
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import Server
from tlora_megatron.service.store import JobState
from tlora_megatron.training.driven_requests import SAMPLED_STEPS, UNKNOWN_LOGPROB

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class PlayedSampler(Sampler):
    """Draws the seed's last digit, as often as asked; a prompt that begins with 9 is refused."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Prompt]] = []
        self.is_full = self.is_away = False

    def check_room(self) -> None:
        if self.is_full:
            raise SamplerBusy("full")

    async def generate(self, base: str, prompts: Sequence[Prompt]) -> list[Answer]:
        self.asked += [(base, prompt) for prompt in prompts]
        if prompts[0].tokens[0] == 9:
            raise SamplingRefused("a prompt must not begin with 9 here, got one that does")
        if prompts[0].tokens[0] == 7:
            raise SamplerUnavailable("the sampler has ended: ValueError in /srv/base")
        if self.is_away:
            raise SamplerAway("vLLM does not answer")
        if prompts[0].tokens[0] == 8:
            await asyncio.sleep(1e6)
        digit = int(str(prompts[0].params.seed)[-1])
        sampled = Sampled(
            tokens=(digit,) * (prompts[0].params.max_tokens or 1),
            logprobs=(-0.5,) * (prompts[0].params.max_tokens or 1),
            stop_reason="length",
            text="",
            stopped_by=None,
            top_logprobs=(tuple(TokenLogprob(token, -token / 2) for token in (1, digit, 3, 4)),)
            * ((prompts[0].params.max_tokens or 1) if prompts[0].params.top_logprobs else 0),
        )
        scores = (None, *(-1.0 for _ in prompts[0].tokens[1:]))
        return [
            Answer(
                sequences=(sampled,) * prompts[0].num_samples,
                prompt_logprobs=scores if prompts[0].prompt_logprobs else None,
                top_prompt_logprobs=None,
                target_logprobs=tuple(tuple(map(float, row)) for row in prompts[0].targets),
            )
        ]


@pytest.fixture
def sampler(played: Played) -> PlayedSampler:
    """The sampler that the service draws with."""
    played.api.service.sampler = PlayedSampler()
    return played.api.service.sampler


def draw(client: tinker.SamplingClient, *tokens: int, **params: Any) -> types.SampleResponse:
    prompt = types.ModelInput.from_ints(list(tokens))
    wanted = types.SamplingParams(**{"max_tokens": 2, "seed": 7, **params})
    return client.sample(prompt, num_samples=2, sampling_params=wanted).result()


def test_a_base_and_what_was_learnt_are_sampled(played: Played, sampler: PlayedSampler) -> None:
    service = played.client()
    base = service.create_sampling_client(base_model=BASE).result()
    assert [s.tokens for s in draw(base, 1, 2).sequences] == [[7, 7], [7, 7]]
    model = service.create_lora_training_client(base_model=BASE, rank=4).result()
    learnt = model.save_weights_and_get_sampling_client().result()
    draw(learnt, 1, temperature=0.0, top_k=5, top_p=0.5, stop=["x", "y"])
    named = model.save_weights_for_sampler("ours").result().path
    draw(service.create_sampling_client(model_path=named).result(), 1, stop=[])
    folders = [None if p.adapter is None else Path(p.adapter).name for _, p in sampler.asked]
    assert folders == [None, "00000001", "00000002"]
    params = sampler.asked[1][1].params
    assert (params.temperature, params.top_k, params.top_p, params.stop) == (0, 5, 0.5, ("x", "y"))
    assert [p.params.ignore_eos for _, p in sampler.asked] == [False, False, True]
    scores = learnt.compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result()
    assert scores == [None, -1.0, -1.0]
    ephemeral = played.rest().list_checkpoints(model.model_id).result().checkpoints
    assert [c.checkpoint_id for c in ephemeral] == ["sampler_weights/ours"]


def test_a_setting_that_is_not_there_is_refused() -> None:
    prompt = {"chunks": [{"tokens": [1]}]}
    newer = {"max_tokens": 1, "temperature": 0.5, "min_k": None, "penalty": 0.0}
    bodies.check_sample(bodies.Sample.model_validate({"prompt": prompt, "sampling_params": newer}))
    asks = {"prompt": prompt, "sampling_params": newer | {"min_p": 0.1}}
    image = {"prompt": {"chunks": [{"type": "image", "data": "x"}]}, "sampling_params": {}}
    for sentence, wrong in {
        r"sampling_params.min_p must be left out: .* got 0.1": asks,
        "prompt must be tokens of text, got a chunk of 'image'": image,
    }.items():
        with pytest.raises(Refused, match=sentence):
            bodies.check_sample(bodies.Sample.model_validate(wrong))


def test_any_tokens_are_scored_in_the_place_of_the_prompt_s(
    played: Played, sampler: PlayedSampler
) -> None:
    client = played.client().create_sampling_client(base_model=BASE).result()
    prompt, wanted = types.ModelInput.from_ints([1, 2, 3]), torch.tensor([[5, -1], [6, 2]])
    targets = types.TensorData.from_torch(wanted)
    params = types.SamplingParams(max_tokens=1)
    found = client.sample(prompt, 1, params, target_prompt_logprobs=targets).result()
    assert found.target_prompt_logprobs is not None
    assert found.target_prompt_logprobs.tolist() == [[5, 0], [6, 2]]


class Trained:
    """A model, and data of a prompt of two tokens with two that were sampled."""

    def __init__(self, played: Played, **params: Any) -> None:
        service = played.client()
        self.model = service.create_lora_training_client(base_model=BASE, rank=4).result()
        source = self.model.save_weights_and_get_sampling_client(record_stability_info=True)
        self.sequence = draw(source.result(), 1, 2, **params).sequences[1]

    def datum(self, spans: list[Any] | None = None, **inputs: Any) -> types.Datum:
        """As the cookbook's `rl_loop` makes it."""
        id, tokens = self.sequence.sequence_id, self.sequence.tokens
        given = {
            "target_tokens": [0, *tokens],
            "logprobs": [0.0, *(self.sequence.logprobs or ())],
            "advantages": [0.0, 1.0, 1.0],
        }
        datum = types.Datum(types.ModelInput.from_ints([1, 2, tokens[0]]), {**given, **inputs})
        own = [
            types.PromptProvenanceSpan(sequence_id=id, offset=1, length=1),
            types.SampledProvenanceSpan(sequence_id=id, length=2),
        ]
        return replace(
            datum, model_input_spans=[], loss_fn_input_spans=own if spans is None else spans
        )


def test_what_was_recorded_of_a_sample_trains_beside_it(
    played: Played, sampler: PlayedSampler
) -> None:
    """The sampled token is not among the others that stand in its place."""
    trained = Trained(played)
    (asked,) = played.api.home.root.glob("tenants/ann/tinker/*/samples/*/*.json")
    os.utime(asked, (0, 0))
    passed = trained.model.forward_backward([trained.datum()], "stable_reinforce").result()
    (told,) = (out["logprobs"].tolist() for out in passed.loss_fn_outputs)
    assert told == pytest.approx([0, -0.7, -0.7])
    sweep_samples(asked.parents[1], time.time() + 22 * 3600)
    assert asked.exists()
    request = played.models.done[-1][1]
    assert (request.loss_fn, request.params["runs"]) == ("stable_reinforce", [4])
    assert request.params[SAMPLED_STEPS] == [1], "what the save answered"
    arrays = {name: array.reshape(4, -1).tolist() for name, array in request.arrays.items()}
    assert arrays["tokens"] == [[1, 2, 7]] * 4
    assert arrays["targets"] == [[0, 7, 7], [0, 1, 1], [0, 3, 3], [0, 4, 4]]
    none = UNKNOWN_LOGPROB
    likely = [[none, -token / 2, -token / 2] for token in (1, 3, 4)]
    assert arrays["logprobs"] == [[0, -0.5, -0.5], *likely]
    assert arrays["advantages"] == [[0, 1, 1]] * 4


def sampled_span(id: str, length: int = 3, offset: int = 0) -> types.SampledProvenanceSpan:
    return types.SampledProvenanceSpan(sequence_id=id, length=length, offset=offset)


@pytest.mark.parametrize(
    ("spans", "inputs", "sentence"),
    [
        ([], {}, r"data\[0\].loss_fn_input_spans must name where each of the 3 targets is from"),
        (None, {"advantages": [1.0, 1.0, 1.0]}, "advantages must be 0 where no token was sampled"),
        (None, {"target_tokens": [0, 7, 8]}, "target_tokens must be the tokens of"),
        ([sampled_span("OWN")], {}, "target_tokens must be the tokens of"),
        ([sampled_span("s1")], {}, "request_id must be one that this service gave"),
        ([sampled_span("OWN9")], {}, "a sequence_id must be of a sample of session s"),
    ],
)
def test_data_of_no_recorded_sample_are_refused(
    played: Played, sampler: PlayedSampler, spans: Any, inputs: dict[str, Any], sentence: str
) -> None:
    trained = Trained(played)
    for span in spans or ():
        id = span.sequence_id.replace("OWN", trained.sequence.sequence_id.partition(BY)[0])
        spans = [replace(span, sequence_id=id)]
    wrong = [trained.datum(spans, **inputs)]
    with pytest.raises(tinker.APIStatusError, match=sentence):
        trained.model.forward_backward(wrong, "stable_reinforce").result()


def test_a_sample_of_a_part_of_the_tokens_is_not_recorded(
    played: Played, sampler: PlayedSampler
) -> None:
    trained = Trained(played, temperature=0.5)
    with pytest.raises(tinker.APIStatusError, match="at temperature 1 and from all tokens"):
        trained.model.forward_backward([trained.datum()], "stable_reinforce").result()


def test_what_is_not_sampled_is_told(played: Played, sampler: PlayedSampler) -> None:
    client = played.client().create_sampling_client(base_model=BASE).result()
    with pytest.raises(tinker.RequestFailedError, match="a prompt must not begin with 9 here"):
        draw(client, 9)
    params, prompt = types.SamplingParams(max_tokens=1), types.ModelInput.from_ints([1])
    more = client.sample(prompt, 1, params, prompt_alt_tokens_k=2)
    with pytest.raises(tinker.UnprocessableEntityError, match="prompt_alt_tokens_k must be left"):
        more.result()
    with pytest.raises(tinker.UnprocessableEntityError, match="num_samples must be between 1"):
        client.sample(prompt, 500, params).result()


def test_a_sample_is_drawn_once_and_again_after_a_death(
    played: Played, sampler: PlayedSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Raw(played.api)
    post = client.post
    with client.http:  # one event loop for all requests
        session = client.session()
        sampler_id = post(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model=BASE,
        ).json()["sampling_session_id"]
        body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        asked = {**body, "sampling_session_id": sampler_id, "seq_id": 0}
        first, second = post("asample", **asked).json(), post("asample", **asked).json()
        assert first == second
        told = [post("retrieve_future", request_id=first["request_id"]) for _ in range(2)]
        assert told[0].content == told[1].content
        assert len(sampler.asked) == 1
        folder = played.api.home.tenant("ann") / "tinker" / session / "samples"
        (folder / "0" / "0.pb").unlink()  # as if the process had died before
        assert post("retrieve_future", request_id=first["request_id"]).content == told[0].content
        assert len(sampler.asked) == 2
        slow = {**asked, "seq_id": 1, "prompt": {"chunks": [{"tokens": [8]}]}}
        waiting = post("asample", **slow).json()["request_id"]
        assert post("cancel_future", request_id=waiting).status_code == 200
        sampler.is_full = True
        full = post("asample", **slow)
        assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
        sampler.is_full = False
        monkeypatch.setattr(tinker_sampling, "_ALONE_S", 0.2)
        left = post("asample", **{**slow, "seq_id": 3}).json()["request_id"]
        count, looks = len(sampler.asked) + 2, 0
        while len(sampler.asked) < count:  # begun, given up, and begun again
            assert post("retrieve_future", request_id=left).json()["type"] == "try_again"
            assert (looks := looks + 1) < 50
        monkeypatch.undo()
        broken = {**asked, "seq_id": 2, "prompt": {"chunks": [{"tokens": [7]}]}}
        failed = post("asample", **broken).json()["request_id"]
        error = post("retrieve_future", request_id=failed).json()["error"]
        assert error == "the sampler cannot be used now; the service's log says why"
        sampler.is_away = True
        request = post("asample", **{**asked, "seq_id": 4}).json()["request_id"]
        assert post("retrieve_future", request_id=request).json()["queue_state_reason"]
        sampler.is_away = False
        assert decode_sample(post("retrieve_future", request_id=request).content)
        sweep_samples(folder, float("inf"))
        assert post("retrieve_future", request_id=first["request_id"]).status_code == 410


@pytest.fixture
def vllm(tmp_path: Path, played: Played) -> Iterator[str]:
    """A server with room for one adapter, so that it reads each of two again and again."""
    with listening(make_app(BASE, "key", max_loras=1)) as address:
        played.api.service.sampler = open_sampler(tmp_path, address)
        yield address


def open_sampler(folder: Path, address: str) -> VllmSampler:
    return VllmSampler(folder, {}.__getitem__, running=[Server(address, "key")])


def draw_three(client: tinker.SamplingClient) -> list[int]:
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
        assert [draw_three(client) for client in clients] == [
            [11, 12, 13], [12, 14, 16], [13, 16, 19],
        ]  # fmt: skip
    played.rest().delete_checkpoint_from_tinker_path(path).result()
    look(played.api)
    # Another process of HTTP goes on with the server that has these adapters.
    played.api.service.sampler = open_sampler(tmp_path, vllm)
    assert [draw_three(client)[0] for client in clients] == [11, 12, 13]
    (job,) = played.api.store.jobs.page()
    by = [f"{job.id}@{number}" for number in (1, 2, 3)]
    told = played.api.client().get(f"/api/v1/samplers/{clients[0]._sampling_session_id}")
    assert told.json()["version"] == by[0]
    ids = [draw(client, 10).sequences[0].sequence_id for client in clients]
    assert [id.partition(BY)[2] for id in ids] == by


def test_inflight_clients_move_to_the_newest_of_their_kind(played: Played, vllm: str) -> None:
    learning = played.client().create_lora_training_client(base_model=BASE, rank=4).result()
    clients, first = [], []
    for weights, kind in (("x", "inflight"), ("xx", "snapshot"), ("xxx", "inflight")):
        played.models.weights = weights
        made = learning.save_weights_and_get_sampling_client(kind=kind)  # type: ignore[arg-type]
        clients.append(made.result())
        first.append([draw_three(client)[0] for client in clients])
    assert first == [[11], [11, 12], [13, 12, 13]]


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
        self.api, self.client = api, Raw(api)
        self.session = self.client.session()
        self.model = self.client.model(self.session)
        self.path = f"tinker://{self.model}/sampler_weights/latest"
        self.published = 0

    def publish(self) -> None:
        self.published += 1
        body = {"model_id": self.model, "seq_id": self.published, "path": "latest"}
        assert self.client.post("save_weights_for_sampler", **body).status_code == 200
        self.client.models.step()

    def sampler(self, number: int, session_id: str | None = None) -> Any:
        body = {"session_id": session_id or self.session, "sampling_session_seq_id": number}
        return self.client.post("create_sampling_session", **body, model_path=self.path).json()

    def begin(self, sampler_id: str, seq_id: int) -> str:
        body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        asked = {**body, "sampling_session_id": sampler_id, "seq_id": seq_id}
        return str(self.client.post("asample", **asked).json()["request_id"])

    def ask(self, sampler_id: str, seq_id: int) -> Any:
        return self.client.post("retrieve_future", request_id=self.begin(sampler_id, seq_id))


@pytest.fixture
def loop(api: Api, tmp_path: Path) -> Iterator[Loop]:
    """A loop over a service with a server that has no adapter in memory for long."""
    with listening(make_app(BASE, "key", max_loras=1)) as address:
        api.service.sampler = open_sampler(tmp_path / "log", address)
        found = Loop(api)
        found.client.models.weights = "x"
        with found.client.http:
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
    other = loop.client.session()
    pinned = loop.sampler(0, other)["sampling_session_id"]
    loop.client.finish(loop.session)
    loop.client.models.step()
    look(loop.api)
    assert versions(loop.api) == [KEPT_FOR_SAMPLERS + 3], "its name leads there"
    loop.client.delete(f"training_runs/{loop.model}/checkpoints/sampler_weights/latest")
    look(loop.api)
    assert "error" not in loop.ask(pinned, 0).text
    loop.client.finish(other)
    look(loop.api)
    assert versions(loop.api) == []


def test_what_waits_is_drawn_from_its_version(loop: Loop) -> None:
    """Published anew, deleted, forgotten by its session, and asked of another process of HTTP."""
    sampler, may_go = loop.api.service.sampler, threading.Event()
    generate = sampler.generate

    async def wait(base: str, prompts: Sequence[Prompt]) -> list[Answer]:
        while not may_go.is_set():
            await asyncio.sleep(0.01)
        return list(await generate(base, prompts))

    sampler.generate = wait  # type: ignore[method-assign,union-attr]
    loop.publish()
    request = loop.begin(loop.sampler(0)["sampling_session_id"], 0)
    loop.client.models.weights = "xx"
    loop.publish()
    loop.client.delete(f"training_runs/{loop.model}/checkpoints/sampler_weights/latest")
    loop.client.finish(loop.session)
    loop.client.models.step()
    look(loop.api)
    assert versions(loop.api) == [1], "it is being drawn from"
    may_go.set()
    with Raw(replace(loop.api, app=make_service(loop.api.service))).http as other:
        told = other.post("/api/v1/retrieve_future", json={"request_id": request})
    assert [tokens.tolist() for tokens, *_ in decode_sample(told.content)] == [[2]]


def folder_of(loop: Loop, number: int) -> Path:
    (job,) = loop.api.store.jobs.page()
    return loop.api.home.job(job.id) / "sampler" / ".versions" / f"{number:08d}"


def test_a_job_may_begin_at_a_published_name(loop: Loop) -> None:
    loop.publish()
    (job,) = loop.api.store.jobs.page()
    known = References(loop.api.home, loop.api.store, {}, tenant="ann")
    found = known.folder(f"jobs/{job.id}/sampler/latest", "init_from")
    first = folder_of(loop, 1)
    assert found == str(first)
    beginning = put_job(loop.api.store, "b", document={"document": {"init_from": found}})
    loop.publish()
    look(loop.api)
    assert first.exists()
    set_state(loop.api.store, beginning, JobState.CANCELLED)
    look(loop.api)
    assert not first.exists()


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
    with held(name):
        loop.client.delete(f"training_runs/{loop.model}/checkpoints/sampler_weights/latest")
        look(loop.api)
        assert name.is_dir()
    look(loop.api)
    assert not name.exists()
    loop.publish()
    assert versions(loop.api) == [2]
    assert name.is_symlink()
    assert "as it was when this sampling client was made" in loop.ask(sampler, 1).text
