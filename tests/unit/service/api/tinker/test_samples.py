"""Samples of the unmodified client; the sampler is played."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.helpers.http_service import BASE
from tests.unit.service.api.tinker.conftest import Played
from tlora_megatron.runtime.sampling.values import Answer, Prompt, Sampled
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.bodies import Refused
from tlora_megatron.service.api.tinker.sampling import SampleFiles, sweep_samples
from tlora_megatron.service.sampling.sampler import SamplerUnavailable, SamplingRefused

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class PlayedSampler:
    """Draws the seed's last digit, as often as asked; a prompt that begins with 9 is refused."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Prompt]] = []

    async def generate(self, base: str, prompts: Sequence[Prompt]) -> list[Answer]:
        self.asked += [(base, prompt) for prompt in prompts]
        if prompts[0].tokens[0] == 9:
            raise SamplingRefused("a prompt must not begin with 9 here, got one that does")
        if prompts[0].tokens[0] == 7:
            raise SamplerUnavailable("the sampler has ended: ValueError in /srv/base")
        if prompts[0].tokens[0] == 8:
            await asyncio.sleep(1e6)
        digit = int(str(prompts[0].params.seed)[-1])
        sampled = Sampled(
            tokens=(digit,) * (prompts[0].params.max_tokens or 1),
            logprobs=(-0.5,) * (prompts[0].params.max_tokens or 1),
            stop_reason="length",
            text="",
            stopped_by=None,
            top_logprobs=(),
        )
        scores = (None, *(-1.0 for _ in prompts[0].tokens[1:]))
        return [
            Answer(
                sequences=(sampled,) * prompts[0].num_samples,
                prompt_logprobs=scores if prompts[0].prompt_logprobs else None,
                top_prompt_logprobs=None,
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
    with pytest.raises(Refused, match=r"sampling_params.min_p must be left out: .* got 0.1"):
        bodies.check_sample(bodies.Sample.model_validate(asks))


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
    played: Played, sampler: PlayedSampler
) -> None:
    http = played.api.client()

    def post(route: str, /, **body: Any) -> Any:
        return http.post(f"/api/v1/{route}", json=body)

    with http:  # one event loop for all requests
        session = post("create_session", sdk_version="0.38.0").json()["session_id"]
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
        broken = {**asked, "seq_id": 2, "prompt": {"chunks": [{"tokens": [7]}]}}
        failed = post("asample", **broken).json()["request_id"]
        error = post("retrieve_future", request_id=failed).json()["error"]
        assert error == "the sampler cannot be used now; the service's log says why"
        sweep_samples(folder, float("inf"))
        assert post("retrieve_future", request_id=first["request_id"]).status_code == 410


def test_an_answer_is_read_only_once_it_is_whole(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, 3)
    assert files.ask({"seed": 1})
    assert not files.ask({"seed": 2})
    assert files.asked() == {"seed": 1}
    assert files.result() is None
    files.fail("no", "user")
    assert files.result() == {"error": "no", "category": "user"}
    files.answer(b"")
    assert files.result() == b""
