"""The process that samples from one base: `python -m tlora_megatron.service.sampling.process`.

Its first line of input says everything: the base, limits, the socket. It says that it is ready once
it listens. It ends when its input does, that is with the process that has started it, and when
nobody has asked for a while. Model and tokenizer belong to one thread, on which the loop of the
sockets lets single steps run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tlora_megatron.channel import LinePipe, to_line
from tlora_megatron.runtime.sampling.batcher import Batcher, open_batcher
from tlora_megatron.runtime.sampling.tracks import Request
from tlora_megatron.runtime.sampling.values import Piece, SamplerLimits, merged
from tlora_megatron.service.sampling.wire import lean, prompt_from_json, serve
from tlora_megatron.training.data.tokenize import encode_prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
_TOKEN_CHARACTERS = 256
"""No token has as many; a text with more for each position of the base is not tokenized at all,
since everybody else would wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The first line of input."""

    base: Mapping[str, Any]
    """section `base_model` of a configuration, its path absolute"""
    socket: str
    idle_s: float
    limits: Mapping[str, Any]


class SamplingProcess:
    """Serves one base over a socket; the batcher is used on one thread alone."""

    def __init__(self, batcher: Batcher, idle_s: float) -> None:
        self._batcher = batcher
        self._thread = ThreadPoolExecutor(1)
        self._idle_s = idle_s
        self._connections = 0
        self._has_work = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self, socket: Path, pipe: LinePipe) -> None:
        """Serves until nobody has asked for a while, a pipe has ended, or a step has failed."""
        server = await serve(socket, self._answer)
        pipe.send({"ready": True})
        tasks = [
            asyncio.create_task(work)
            for work in (self._step(), self._wait_until_idle(), _wait_for_the_end(pipe))
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        server.close()  # without waiting for requests, which would wait for steps
        for task in tasks:
            task.cancel()
        with suppress(FileNotFoundError):
            socket.unlink()
        for task in done:
            task.result()

    async def _step(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while await self._on_thread(self._one_step):
                await asyncio.sleep(0)

    def _one_step(self) -> bool:
        self._batcher.step()
        return self._batcher.has_work

    async def _wait_until_idle(self) -> None:
        while True:
            self._changed.clear()
            patience = None if self._connections else self._idle_s
            try:
                await asyncio.wait_for(self._changed.wait(), patience)
            except TimeoutError:
                logger.info("nobody has asked for %g s: it ends", self._idle_s)
                return

    async def _on_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        self._changed.set()
        try:
            await self._carry_out(json.loads(await reader.readline()), reader, writer)
        except (ValueError, TypeError, KeyError) as error:
            is_missing = isinstance(error, KeyError)
            await _refuse(writer, f"{error.args[0]} must be given" if is_missing else str(error))
        except ConnectionError:
            pass
        except Exception as error:  # of one request: who asks would take silence for a death
            logger.exception("a request failed")
            await _refuse(writer, f"the request failed: {type(error).__name__}")
        finally:
            self._connections -= 1
            self._changed.set()
            writer.close()

    async def _carry_out(
        self, message: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        op = message.get("op") if isinstance(message, dict) else None
        if op == "generate":
            await self._generate(message, reader, writer)
            return
        answer: dict[str, Any]
        if op == "encode":
            answer = {"tokens": await self._on_thread(self._encode, message)}
        elif op == "decode":
            answer = await self._on_thread(self._decode, message)
        else:
            raise ValueError(f"op must be generate, encode or decode, got {op!r}")
        writer.write(to_line(answer))
        await writer.drain()

    def _encode(self, message: Mapping[str, Any]) -> list[int]:
        text = message["messages"] if "messages" in message else message["text"]
        words = self._batcher.words
        tools = message.get("tools")
        size, most = len(json.dumps(text)), _TOKEN_CHARACTERS * words.max_positions
        size += len(json.dumps(tools)) if tools else 0
        if size > most:
            raise ValueError(f"prompt must have at most {most} characters, got {size}")
        return encode_prompt(words.tokenizer, text, tools)

    def _decode(self, message: Mapping[str, Any]) -> dict[str, Any]:
        def text_of(tokens: list[int]) -> str:
            tokenizer = self._batcher.words.tokenizer
            return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

        tokens = message["tokens"]
        if message.get("each"):
            return {"texts": [text_of([token]) for token in tokens]}
        return {"text": text_of(tokens)}

    async def _generate(
        self,
        message: Mapping[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Queue[Piece | ValueError]()
        held: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)

        def tell(piece: Piece | ValueError) -> None:
            if message.get("whole") and isinstance(piece, Piece) and piece.scores is None:
                parts = held[piece.prompt, piece.sample]
                parts.append(piece)
                if piece.stop_reason is None:
                    return
                piece = merged(parts)
            loop.call_soon_threadsafe(told.put_nowait, piece)

        def add() -> list[Request]:
            prompts = [prompt_from_json(value) for value in message["prompts"]]
            found = [
                self._batcher.request(prompt, number, int(message["seed"]) + number, tell)
                for number, prompt in enumerate(prompts)
            ]
            for request in found:  # all or none
                self._batcher.add(request)
            return found

        requests = await self._on_thread(add)
        self._has_work.set()
        left = sum(request.num_ends for request in requests)
        gone = asyncio.create_task(reader.read(1))
        try:
            while left:
                left -= sum(
                    requests[piece.prompt].ends(piece)
                    for piece in await self._pass_on(told, gone, writer)
                )
            writer.write(to_line({"done": True}))
            await writer.drain()
        finally:
            gone.cancel()
            for request in requests:
                request.is_cancelled = True
            self._has_work.set()

    async def _pass_on(
        self,
        told: asyncio.Queue[Piece | ValueError],
        gone: asyncio.Task[bytes],
        writer: asyncio.StreamWriter,
    ) -> list[Piece]:
        """Writes what has been told, and returns it; `ConnectionError` if nobody listens."""
        news = asyncio.create_task(told.get())
        await asyncio.wait((news, gone), return_when=asyncio.FIRST_COMPLETED)
        if not news.done():
            news.cancel()
            raise ConnectionResetError("the one who asked has gone")
        found = [news.result()]
        while not told.empty():
            found.append(told.get_nowait())
        pieces = []
        for piece in found:
            if isinstance(piece, ValueError):
                raise piece
            pieces.append(piece)
            writer.write(to_line({"piece": lean(piece)}))
        await writer.drain()
        return pieces


async def _refuse(writer: asyncio.StreamWriter, sentence: str) -> None:
    with suppress(ConnectionError):
        writer.write(to_line({"error": sentence}))
        await writer.drain()


async def _wait_for_the_end(pipe: LinePipe) -> None:
    """Waits until the other end of a pipe is closed."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()

    def read() -> None:
        pipe.receive()
        if pipe.is_over:
            loop.remove_reader(pipe.fileno())
            over.set()

    loop.add_reader(pipe.fileno(), read)
    await over.wait()
    logger.info("the process that has started it is gone: it ends")


def main() -> None:
    """Reads the order and serves."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s: %(message)s")
    pipe = LinePipe.of_child()
    pipe.wait()
    order = Order(**pipe.receive()[0])
    try:
        batcher = open_batcher(order.base, SamplerLimits(**order.limits))
    except (ValueError, ImportError) as error:
        sys.exit(str(error))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    asyncio.run(SamplingProcess(batcher, order.idle_s).run(Path(order.socket), pipe))


if __name__ == "__main__":
    main()
