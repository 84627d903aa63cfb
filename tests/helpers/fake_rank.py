"""A rank of a gang without torch and without training, for tests of engines.

Rank 0 says `started`, then `applied` to every command and `stopped` to the last one. The others
wait for that word. Commands `save` with a body make ranks end: `{"rank": K, "how": HOW}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.supervisor import identity_of
from tlora_megatron.service.worker.gang_logs import CommandReader, EventWriter


def main(folder: GangFolder, rank: int) -> int:
    print(f"rank {rank} sits at {os.environ['CUDA_VISIBLE_DEVICES']!r}", flush=True)
    folder.write(folder.pid(rank).name, f"{identity_of()}")
    if folder.is_closed:
        return 1
    code = _lead(folder) if rank == 0 else _follow(folder, rank)
    folder.write(f"exit_{rank}", str(code))
    return code


def _lead(folder: GangFolder) -> int:
    spec = folder.spec()
    reader, writer = CommandReader(spec, folder.commands()), EventWriter(spec, folder.events())
    writer.tell("started", None, {"pid": os.getpid()})
    while True:
        reader.wait(10.0)
        for command in reader.take():
            writer.tell("applied", command["job"], {"seq": command["seq"]})
            if command["kind"] == "stop":
                writer.tell("stopped", None, {})
                return 0
            if command["body"].get("rank") == 0:
                return _end(folder, 0, command["body"])


def _follow(folder: GangFolder, rank: int) -> int:
    events, commands = folder.events(), folder.commands()
    seq = 0
    while True:
        last = events.last()
        if last is not None and last.kind == "stopped":
            return 0
        for command in commands.after(seq):
            seq = command.seq
            if command.body.get("rank") == rank:
                return _end(folder, rank, dict(command.body))
        time.sleep(0.005)


def _end(folder: GangFolder, rank: int, body: dict[str, object]) -> int:
    if "ending" in body:
        folder.write(f"end_{rank}.json", json.dumps(body["ending"]))
    print("my last words", flush=True)
    return int(str(body["code"]))


if __name__ == "__main__":
    sys.exit(main(GangFolder.at(Path(sys.argv[1])), int(sys.argv[2])))
