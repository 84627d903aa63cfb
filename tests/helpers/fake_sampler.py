"""A sampling process without a model, for tests: counts on from a prompt's last token.

What it is told by its base's `path`: `refuse` says why and ends; `die N` ends in its first N
answers, after two pieces; `drop N` only breaks these off.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tlora_megatron.channel import LinePipe, to_line
from tlora_megatron.runtime.sampling.values import Piece
from tlora_megatron.service.sampling.wire import lean, prompt_from_json, serve


async def main() -> None:
    """Serves until it is idle."""
    pipe = LinePipe.of_child()
    pipe.wait()
    (order,) = pipe.receive()
    words = str(order["base"]["path"]).split()
    if words[0] == "refuse":
        sys.exit("base_model must be better")
    deaths = Path(order["socket"]).with_suffix(".deaths")
    left = int(words[1]) if words[0] in ("die", "drop") else 0
    over = asyncio.Event()
    open_ones = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_ones
        open_ones += 1
        with suppress(ConnectionError):  # whoever has what he wants hangs up
            await reply(json.loads(await reader.readline()), writer)
        writer.close()
        open_ones -= 1
        over.set()

    async def reply(message: Any, writer: asyncio.StreamWriter) -> None:
        if message["op"] == "encode":
            writer.write(to_line({"tokens": [os.getpid()]}))
        for number, value in enumerate(message.get("prompts", [])):
            prompt = prompt_from_json(value)
            count = prompt.params.max_tokens or 3
            for index in range(1, count + 1):
                died = len(deaths.read_text()) if deaths.exists() else 0
                if index == 3 and died < left:
                    deaths.write_text("x" * (died + 1))
                    await writer.drain()
                    if words[0] == "drop":
                        return
                    os._exit(1)
                reason = "length" if index == count else None
                token = prompt.tokens[-1] + index
                piece = Piece(prompt=number, tokens=(token,), logprobs=(-1.0,), stop_reason=reason)
                writer.write(to_line({"piece": lean(piece)}))
        writer.write(to_line({"done": True}))
        await writer.drain()

    server = await serve(Path(order["socket"]), answer)
    pipe.send({"ready": True})
    async with server:
        while True:
            over.clear()
            try:
                await asyncio.wait_for(over.wait(), order["idle_s"])
            except TimeoutError:
                if not open_ones:
                    return


if __name__ == "__main__":
    asyncio.run(main())
