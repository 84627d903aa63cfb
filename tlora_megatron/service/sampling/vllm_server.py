"""A `vllm serve` of our own, and prompts as requests to it; its key is known to us alone."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.files import write_atomic
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.runtime.sampling.values import (
    PEFT_FILES,
    Piece,
    Prompt,
    Scores,
    TokenLogprob,
    TopLogprobs,
)
from tlora_megatron.service.home import make_folder
from tlora_megatron.service.sampling.sampler import SamplerUnavailable, SamplingRefused
from tlora_megatron.service.supervisor import Child

_TOKEN = "token_id:"
_GREEDY = 1e-5
"""Below this temperature vLLM takes the likeliest tokens."""


def to_request(prompt: Prompt, *, streams: bool) -> dict[str, Any]:
    """The body but for the model; vLLM scores no prompt in a stream."""
    if prompt.targets:
        raise SamplingRefused("target_prompt_logprobs must be left out: vLLM does not score them")
    params, scored = prompt.params, wants_scores(prompt)
    body: dict[str, Any] = {
        "prompt": list(prompt.tokens),
        # A prompt is not scored without a token behind it.
        "max_tokens": 1 if params.max_tokens == 0 else params.max_tokens,
        # vLLM refuses several of what is the same.
        "n": 1 if params.temperature < _GREEDY else prompt.num_samples,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or 0,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_tokens),
        "ignore_eos": params.ignore_eos,
        "logprobs": params.top_logprobs,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "stream": streams and not scored,
    }
    if scored:
        body["prompt_logprobs"] = prompt.top_prompt_logprobs
    return body


def wants_scores(prompt: Prompt) -> bool:
    """True if a prompt's own tokens are to be scored."""
    wanted = prompt.prompt_logprobs or prompt.top_prompt_logprobs > 0
    return wanted or prompt.params.max_tokens == 0


def pieces_of(number: int, prompt: Prompt, body: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces of an answer to a prompt of this number, or of an event of a stream."""
    choices = body.get("choices", ())
    if wants_scores(prompt) and choices:
        yield Piece(prompt=number, scores=_scores(prompt, choices[0]["prompt_logprobs"]))
    if prompt.params.max_tokens == 0:
        return
    times = prompt.num_samples if prompt.params.temperature < _GREEDY else 1
    for choice in choices:
        piece = _piece(number, prompt, choice)
        yield from (replace(piece, sample=piece.sample + more) for more in range(times))


def _piece(number: int, prompt: Prompt, choice: Mapping[str, Any]) -> Piece:
    tokens = tuple(choice.get("token_ids") or ())
    logprobs = choice.get("logprobs") or {}
    count, reason = prompt.params.top_logprobs, choice.get("finish_reason")
    if reason not in (None, "stop", "length"):  # it is no whole sample
        raise SamplerUnavailable(f"vLLM broke a sample off: {reason}")
    stopped_by = choice.get("stop_reason")
    if reason == "stop" and stopped_by is None:  # vLLM does not name the end of sequence
        stopped_by = tokens[-1] if tokens else None
    return Piece(
        prompt=number,
        sample=choice["index"],
        tokens=tokens,
        logprobs=tuple(logprobs.get("token_logprobs") or ()),
        top_logprobs=tuple(
            _likeliest({int(t.removeprefix(_TOKEN)): v for t, v in top.items()}, count)
            for top in (logprobs.get("top_logprobs") or ())
            if count
        ),
        text=choice["text"],
        stop_reason=None if reason is None else "stop" if reason == "stop" else "length",
        stopped_by=stopped_by if reason == "stop" else None,
    )


def _scores(prompt: Prompt, rows: Sequence[Mapping[str, Any] | None]) -> Scores:
    """Scores from the likeliest tokens of each place and the token that is there."""
    logprobs: list[float | None] = [None]
    top: list[TopLogprobs | None] = [None]
    for token, row in zip(prompt.tokens[1:], rows[1:], strict=True):
        assert row is not None, "only the first token has none before it"
        found = {int(key): float(value["logprob"]) for key, value in row.items()}
        logprobs.append(found[token])
        top.append(_likeliest(found, prompt.top_prompt_logprobs))
    return Scores(logprobs=tuple(logprobs), top=tuple(top) if prompt.top_prompt_logprobs else ())


def _likeliest(found: Mapping[int, float], count: int) -> TopLogprobs:
    order = sorted(found.items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(token, logprob) for token, logprob in order[:count])


def warm_adapter(folder: Path, base: Mapping[str, Any]) -> Path:
    """The folder of an adapter of zeros on one linear of a base, which is written if it is not."""
    spec = read_model_spec(read_spec(BaseModelSpec, dict(base), "base").config_file)
    target = spec.peft_targets[0]
    path, (rows, columns) = spec.module_path(0, target), spec.target_shape(target)
    into = make_folder(folder / f"warm-{rows}-{columns}-{path}")
    shapes = {"A": [1, columns], "B": [rows, 1]}
    places = {"A": [0, 4 * columns], "B": [4 * columns, 4 * (columns + rows)]}
    header = {
        f"base_model.model.{path}.lora_{side}.weight": {
            "dtype": "F32", "shape": shapes[side], "data_offsets": places[side],
        }
        for side in "AB"
    }  # fmt: skip
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(places["B"][1])
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "bias": "none"}
    config["target_modules"] = [path.rpartition(".")[2]]
    if not all((into / name).exists() for name in PEFT_FILES):
        write_atomic(into / PEFT_FILES[0], json.dumps(config), durable=False)
        write_atomic(into / PEFT_FILES[1], content, durable=False)
    return into


COMMAND = ("vllm", "serve")
GUARD = (sys.executable, "-m", "tlora_megatron.service.sampling.vllm_guard")
_LOOK_S = 0.2
"""Between two questions if it is up; loading an 8B model takes minutes."""
_OURS = ("--served-model-name", "--dtype", "--host", "--port", "--api-key", "--enable-lora")
"""Words of `vllm serve` that the service sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How servers are started, and asked."""

    gpu: str | None = None
    """as in CUDA_VISIBLE_DEVICES; None = all"""
    most_rank: int | None = 64
    """of an adapter; vLLM keeps room for so much. None = whatever a server of yours takes"""
    adapters: int = 8
    """in use at a time"""
    words: tuple[str, ...] = ()
    """more for `vllm serve`"""
    patience_s: float = 300.0
    """for servers that do not answer, before a request fails"""
    start_s: float = 1800.0
    """for a server that was started to answer"""
    most_waiting: int = 4096
    """prompts that servers have at once; one more is refused"""
    command: tuple[str, ...] = COMMAND

    def with_words(self, text: str) -> VllmSettings:
        """The settings with more words, from which slots and ranks are read."""
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
        parser.add_argument("--max-loras", type=int, default=self.adapters)
        parser.add_argument("--max-lora-rank", type=int, default=self.most_rank)
        try:
            found, rest = parser.parse_known_args(shlex.split(text))
        except (ValueError, argparse.ArgumentError) as error:
            raise must("--sampler-words", "be words of vllm serve", text, str(error)) from error
        if wrong := [word for word in rest if word.partition("=")[0] in _OURS]:
            raise must("--sampler-words", f"leave {wrong[0]} to the service", text)
        rank = found.max_lora_rank
        return replace(self, adapters=found.max_loras, most_rank=rank, words=tuple(rest))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs."""

    address: str
    key: str | None
    child: Child | None = None
    """The guard of one that was started here; None: somebody else's."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that it wants to see in every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    @property
    def is_over(self) -> bool:
        """True if it was ours and has ended."""
        return self.child is not None and self.child.exit_code is not None


async def start_server(
    folder: Path, name: str, base: Mapping[str, Any], settings: VllmSettings
) -> Server:
    """Starts a server that offers a base under a name, and waits until it answers.

    Raises:
        SamplingRefused: if vLLM cannot have this base.
        SamplerUnavailable: if it cannot be started.
    """
    if base.get("path") is None or base.get("quantization") is not None:
        raise SamplingRefused(
            f"base {name} must be a folder of weights as they are for vLLM; the sampler `own` "
            f"takes random and quantised ones"
        )
    if shutil.which(settings.command[0]) is None:
        raise SamplerUnavailable(
            "vLLM is not installed: pip install vllm, in an environment of its own if torch's "
            "version differs, and put its `vllm` into PATH"
        )
    port, key = _free_port(), secrets.token_urlsafe(32)
    log = make_folder(folder) / f"vllm-{port}.log"
    lock = folder / f"vllm-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock"
    words = (
        *(base["path"], "--served-model-name", name, "--dtype", base["dtype"]),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(settings.most_rank)),
        *("--max-loras", str(settings.adapters), "--max-logprobs", "20", *settings.words),
    )
    added = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_API_KEY": key}
    if settings.gpu is not None:
        added["CUDA_VISIBLE_DEVICES"] = settings.gpu
    command = (*GUARD, str(lock), *settings.command, *words)
    child = Child(command, environment=os.environ | added, log=log, wire="stdin")
    server = Server(f"http://127.0.0.1:{port}", key, child)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.start_s):
                await _wait_until_up(server)
                return server
        raise SamplerUnavailable(f"vllm serve cannot be started: {child.last_words}")
    except BaseException:
        await end_server(server)
        raise


async def end_server(server: Server) -> None:
    if server.child is not None:
        server.child.handle.send(signal.SIGTERM)
        await server.child.ended()
        server.child.close()


async def _wait_until_up(server: Server) -> None:
    """Waits until a server answers; raises `TimeoutError` if it ends."""
    async with httpx.AsyncClient(headers=server.headers) as client:
        while not server.is_over:
            with suppress(httpx.TransportError):
                if (await client.get(f"{server.address}/health")).is_success:
                    return
            await asyncio.sleep(_LOOK_S)
    raise TimeoutError


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
