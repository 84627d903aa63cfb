"""SGLang's server as a sampler, against a stand-in that speaks its documented wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from tests.helpers.http_service import listening
from tests.helpers.launch import HANG_S
from tests.unit.service.sampling.test_vllm import adapter
from tlora_megatron.runtime.sampling.values import Piece, Prompt, SamplingParams, TokenLogprob
from tlora_megatron.service.sampling.sampler import SamplingRefused
from tlora_megatron.service.sampling.sglang_door import SglangDoor
from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
from tlora_megatron.service.sampling.vllm_server import Server, VllmSettings

pytestmark = pytest.mark.anyio


class Generate(BaseModel):
    """Fields of GenerateReqInput that are sent here."""

    model_config = ConfigDict(extra="forbid")
    input_ids: list[list[int]]
    sampling_params: list[dict[str, Any]]
    lora_path: list[str | None]
    return_logprob: bool
    top_logprobs_num: int
    logprob_start_len: int
    stream: bool


def make_app(loaded: dict[str, str], asked: list[Generate]) -> FastAPI:
    """Counts on from the last token, by 2 with an adapter; a seed is a token's log-probability."""
    app = FastAPI()

    def refuse(sentence: str) -> JSONResponse:
        return JSONResponse({"success": False, "error_message": sentence}, 400)

    @app.get("/health")
    async def health() -> None: ...

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": name} for name in ("base", *loaded)]}

    @app.post("/load_lora_adapter")
    async def load(body: dict[str, str]) -> Any:
        if body["lora_name"] in loaded:
            return refuse(f"LoRA with name {body['lora_name']} already exists. Loaded LoRAs: x")
        loaded[body["lora_name"]] = body["lora_path"]

    @app.post("/unload_lora_adapter")
    async def unload(body: dict[str, str]) -> Any:
        if loaded.pop(body["lora_name"], None) is None:
            return refuse(f"LoRA with name {body['lora_name']} does not exist. Loaded LoRAs: x")

    @app.post("/tokenize")
    async def tokenize(body: dict[str, Any]) -> Any:
        return {"tokens": list(body["prompt"].encode())}

    @app.post("/detokenize")
    async def detokenize(body: dict[str, Any]) -> Any:
        return {"text": bytes(body["tokens"]).decode()}

    @app.post("/generate")
    async def generate(body: Generate) -> Any:
        asked.append(body)
        if wrong := [name for name in body.lora_path if name and name not in loaded]:
            told = f"The following requested LoRA adapters are not loaded: {wrong[0]}\nLoaded: x"
            return JSONResponse({"error": {"message": told}}, 400)
        lengths = range(1, body.sampling_params[0]["max_new_tokens"] + 1)
        indices = range(len(body.input_ids))
        if body.stream:
            rows = ({**answer(body, i, n), "index": i} for n in lengths for i in indices)
            events = (*(f"data: {json.dumps(row)}\n\n" for row in rows), "data: [DONE]\n\n")
            return StreamingResponse(iter(events), media_type="text/event-stream")
        return [answer(body, i, lengths[-1]) for i in indices]

    def answer(body: Generate, index: int, length: int) -> dict[str, Any]:
        params, prompt = body.sampling_params[index], body.input_ids[index]
        step = 2 if body.lora_path[index] else 1
        tokens = [prompt[-1] + step * (1 + place) for place in range(length)]
        logprob = -float(params["sampling_seed"])
        is_over = length == params["max_new_tokens"]
        meta: dict[str, Any] = {
            "output_token_logprobs": [[logprob, token, None] for token in tokens],
            "output_top_logprobs": [[[-0.5, 7, None], [-9.0, 8, None]]] * length,
            "finish_reason": {"type": "stop", "matched": "x"} if is_over else None,
        }
        if body.logprob_start_len == 0:
            rest = [[-3.0, token, None] for token in prompt[1:]]
            meta["input_token_logprobs"] = [[None, prompt[0], None], *rest]
            meta["input_top_logprobs"] = [None, *([[-1.0, 5, None]] for _ in rest)]
        return {"text": "".join(map(chr, tokens)), "meta_info": meta}

    return app


@pytest.fixture
def loaded() -> dict[str, str]:
    return {}


@pytest.fixture
def asked() -> list[Generate]:
    return []


@pytest.fixture
def sampler(tmp_path: Path, loaded: dict[str, str], asked: list[Generate]) -> Iterator[VllmSampler]:
    with listening(make_app(loaded, asked)) as address:
        settings = VllmSettings(most_rank=None, patience_s=HANG_S, adapters=1)
        yield VllmSampler(
            tmp_path, {}.__getitem__, settings, [Server(address, "key")], door=SglangDoor
        )


PARAMS = SamplingParams(max_tokens=3, seed=5, top_logprobs=1, top_k=4, stop=("x",))


async def test_samples_of_adapters_with_seeds_of_their_own(
    sampler: VllmSampler, loaded: dict[str, str], asked: list[Generate], tmp_path: Path
) -> None:
    folders = [adapter(tmp_path / name) for name in "ab"]
    prompts = [Prompt(tokens=(40,), params=PARAMS, num_samples=2, adapter=one) for one in folders]
    for prompt in (*prompts, Prompt(tokens=(40,), params=PARAMS, num_samples=2)):
        (answer,) = await sampler.generate("base", [prompt])
        step = 2 if prompt.adapter else 1
        assert [one.tokens for one in answer.sequences] == [
            (40 + step, 40 + 2 * step, 40 + 3 * step)
        ] * 2
        assert [one.logprobs for one in answer.sequences] == [(-5.0,) * 3, (-6.0,) * 3]
        first = answer.sequences[0]
        assert first.top_logprobs == ((TokenLogprob(7, -0.5),),) * 3
        assert (first.stop_reason, first.stopped_by) == ("stop", "x")
    assert list(loaded.values()) == [folders[1]], "one slot: the first one was unloaded"
    assert asked[0].sampling_params[1]["top_k"] == 4
    loaded.clear()  # it was started anew
    assert (await sampler.generate("base", prompts[1:]))[0].sequences[0].tokens == (42, 44, 46)
    await sampler.close()


async def test_streams_and_scores(sampler: VllmSampler) -> None:
    pieces = [one async for one in sampler.stream("base", [Prompt(tokens=(40,), params=PARAMS)])]
    assert [(one.tokens, one.text) for one in pieces if isinstance(one, Piece)] == [
        ((41,), ")"), ((42,), "*"), ((43,), "+"),
    ]  # fmt: skip
    params = SamplingParams(max_tokens=0, seed=1)
    scored = Prompt(tokens=(1, 2, 3), params=params, prompt_logprobs=True, top_prompt_logprobs=1)
    (answer,) = await sampler.generate("base", [scored])
    assert answer.prompt_logprobs == (None, -3.0, -3.0)
    assert answer.top_prompt_logprobs == (None, *((TokenLogprob(5, -1.0),),) * 2)
    await sampler.close()


async def test_texts_and_refusals(sampler: VllmSampler) -> None:
    assert await sampler.encode("base", "ab") == [97, 98]
    assert await sampler.decode("base", [97, 98]) == "ab"
    with pytest.raises(SamplingRefused, match=r"what SGLang serves at .*, base, got other"):
        await sampler.generate("other", [Prompt(tokens=(1,), params=PARAMS)])
    await sampler.close()
