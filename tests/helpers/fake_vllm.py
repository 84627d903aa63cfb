"""Speaks the documented wire of vLLM's server without a model: counts on from the last token.

    python -m tests.helpers.fake_vllm BASE --served-model-name NAME --port N ...

An adapter counts in steps of as many as its file of weights has bytes. As vLLM does, the server
keeps few adapters in memory and reads one that had to go again from its folder, when it is asked
for; it takes no name twice; and if that folder is gone it dies, for all who ask it.

A base whose folder is called `broken` cannot be started. Fields that vLLM does not document are
refused, which vLLM itself does not do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Completion(_Strict):
    """Fields of vLLM's CompletionRequest that are sent here."""

    model: str
    prompt: list[int]
    max_tokens: int | None = 16
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    stream: bool = False


class Adapter(_Strict):
    """Body of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    lora_name: str
    lora_path: str | None = None


class Tokenize(_Strict):
    """Both bodies of `/tokenize`."""

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class Detokenize(_Strict):
    model: str
    tokens: list[int]


class Adapters:
    """The adapters that a server knows by name, of which it holds the last few."""

    def __init__(self, most: int, most_rank: int) -> None:
        self.folders: dict[str, str] = {}
        self.is_dead = False
        self._most = most
        self._most_rank = most_rank
        self._steps: dict[str, int] = {}
        """The least lately used first."""

    def check(self, folder: str) -> None:
        """Refuses an adapter with too high a rank; a configuration that is no JSON has none."""
        text = (Path(folder) / "adapter_config.json").read_text()
        rank = json.loads(text).get("r", 1) if text.startswith("{") else 1
        if rank > self._most_rank:
            most = self._most_rank
            raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {most}.")

    def step(self, name: str) -> int:
        """The step of an adapter, which is read if it is not held; 1 = the base's."""
        if name not in self.folders:
            return 1
        if name not in self._steps:
            weights = Path(self.folders[name]) / "adapter_model.safetensors"
            self._steps[name] = len(weights.read_bytes())
        self._steps[name] = self._steps.pop(name)
        for old in list(self._steps)[: -self._most]:
            del self._steps[old]
        return self._steps[name]


def make_app(
    base: str,
    key: str | None,
    log: list[Any] | None = None,
    max_loras: int = 8,
    max_lora_rank: int = 64,
    told: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The server's app; `log` gets what is asked.

    Args:
        told: of `model_config` in `/server_info`, which only a server in dev mode has.
    """
    app, asked = FastAPI(), [] if log is None else log
    adapters = app.state.adapters = Adapters(max_loras, max_lora_rank)

    @app.middleware("http")
    async def check_key(request: Request, call: Any) -> Any:
        wanted = None if key is None else f"Bearer {key}"
        if request.url.path != "/health" and request.headers.get("authorization") != wanted:
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await call(request)

    @app.get("/server_info")
    async def info(config_format: str = "text") -> Any:
        if told is None or config_format != "json":
            return JSONResponse({"detail": "Not Found"}, 404)
        return {"vllm_config": {"model_config": told}}

    @app.get("/health")
    async def health() -> Any:
        asked.append(("health", ""))
        return JSONResponse({}, 503 if adapters.is_dead else 200)

    @app.get("/v1/models")
    async def models() -> Any:
        loaded = [{"id": name, "parent": base} for name in adapters.folders]
        return {"object": "list", "data": [{"id": base, "parent": None}, *loaded]}

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(adapter: Adapter) -> Any:
        asked.append(("load", adapter.lora_path))
        if not os.path.isfile(f"{adapter.lora_path}/adapter_config.json"):
            return _error(404, "Loading lora failed: No adapter found")
        if adapter.lora_name in adapters.folders:
            told = f"The lora adapter '{adapter.lora_name}' has already been loaded."
            return _error(400, told)
        try:
            adapters.check(str(adapter.lora_path))
        except ValueError as error:
            return _error(500, f"Call to add_lora method failed: {error}")
        adapters.folders[adapter.lora_name] = str(adapter.lora_path)
        adapters.step(adapter.lora_name)
        return f"Success: LoRA adapter '{adapter.lora_name}' added successfully."

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(adapter: Adapter) -> Any:
        if adapter.lora_name not in adapters.folders:
            return _error(404, f"The lora adapter '{adapter.lora_name}' cannot be found.")
        asked.append(("unload", adapters.folders.pop(adapter.lora_name)))
        return f"Success: LoRA adapter '{adapter.lora_name}' removed successfully."

    @app.post("/tokenize")
    async def tokenize(body: Tokenize) -> Any:
        text = body.prompt if body.prompt is not None else f"<chat>{body.messages}"
        return {"tokens": list(text.encode()), "count": len(text), "max_model_len": 99}

    @app.post("/detokenize")
    async def detokenize(body: Detokenize) -> Any:
        return {"prompt": bytes(body.tokens).decode()}

    @app.post("/v1/completions")
    async def complete(body: Completion) -> Any:
        asked.append(("complete", adapters.folders.get(body.model, body.model)))
        if body.model != base and body.model not in adapters.folders:
            return _error(404, f"The model `{body.model}` does not exist.")
        try:
            step = adapters.step(body.model)
        except FileNotFoundError:
            adapters.is_dead = True
        if adapters.is_dead:
            return _error(500, "EngineCore encountered an issue.")
        if body.n > 1 and body.temperature == 0:
            return _error(400, "n must be 1 when using greedy sampling")
        if 255 in body.prompt:
            return _error(400, "Token id 255 is out of vocabulary")
        if body.stream and body.prompt_logprobs is not None:
            return _error(400, "`prompt_logprobs` are not available when `stream=True`.")
        if body.stream:
            return StreamingResponse(_events(body, step), media_type="text/event-stream")
        choices = [_choice(body, i, range(body.max_tokens or 4), step) for i in range(body.n)]
        return {"id": "cmpl-1", "object": "text_completion", "choices": choices}

    return app


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "x", "code": status}}, status)


def _events(body: Completion, step: int) -> Iterator[str]:
    for place in range(body.max_tokens or 4):
        for index in range(body.n):
            choice = _choice(body, index, range(place, place + 1), step)
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def _choice(body: Completion, index: int, places: range, step: int) -> dict[str, Any]:
    tokens = [body.prompt[-1] + step * (1 + place) + index for place in places]
    is_last = places.stop == (body.max_tokens or 4)
    top = {f"token_id:{t}": -0.5 for t in (7, 8, 9)[: body.logprobs or 0]}
    return {
        "index": index,
        "text": "".join(map(chr, tokens)),
        "token_ids": tokens,
        "finish_reason": ("stop" if body.stop else "length") if is_last else None,
        "stop_reason": body.stop[0] if body.stop and is_last else None,
        "logprobs": {
            "tokens": [f"token_id:{t}" for t in tokens],
            "token_logprobs": [-float(place) - 1 for place in places],
            "top_logprobs": [{f"token_id:{t}": -2.0, **top} for t in tokens],
            "text_offset": [0] * len(tokens),
        },
        "prompt_logprobs": None if body.prompt_logprobs is None else [
            None, *({str(t): {"logprob": -3.0}, "5": {"logprob": -1.0}} for t in body.prompt[1:]),
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--enable-lora", action="store_true", required=True)
    for name in ("served-model-name", "host", "port", "dtype", "max-lora-rank", "max-loras"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--max-logprobs")
    args = parser.parse_args()
    if args.base.endswith("broken"):
        sys.exit("ValueError: the engine core has failed")
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    slots = int(args.max_loras)
    rank = int(args.max_lora_rank)
    key = os.environ["VLLM_API_KEY"]
    app = make_app(args.served_model_name, key, max_loras=slots, max_lora_rank=rank)
    uvicorn.run(app, host=args.host, port=int(args.port), log_level="warning")


if __name__ == "__main__":
    main()
