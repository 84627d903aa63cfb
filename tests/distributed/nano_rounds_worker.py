"""Worker: processes with different times and room choose nano-batches; prints what each ran."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.parallel.overlap import LaneRoom
from tlora_megatron.training.nano.rounds import NanoRounds
from tlora_megatron.training.nano.trace import NanoTrace
from tlora_megatron.training.packing.packing import Round

MOST = (4, 2)
"""That each process has room for."""
TIMES = ({1: 1.0, 2: 0.7, 3: 0.5, 4: 0.4}, {1: 0.9, 2: 0.8, 3: 0.5, 4: 0.4})
"""Times of a round in so many nano-batches, in seconds."""


class _Documents(Round):
    num_tokens = 1000
    most_documents = 8


class _Switch:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.counts: list[int] = []

    @property
    def count(self) -> int:
        return self.counts[-1]

    def set_count(self, count: int) -> None:
        self.counts.append(count)

    def room(self) -> LaneRoom:
        return LaneRoom(MOST[self.rank], 1e9 * MOST[self.rank])

    def close(self) -> None:
        raise AssertionError("rounds must leave the engine open")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    switch = _Switch(rank)
    counts = switch.counts
    rounds = NanoRounds(
        "best", switch, NanoTrace(Path(sys.argv[1])) if rank == 0 else None, jobs=(),
        device=torch.device("cpu"), resuming=False,
    )  # fmt: skip
    content: Any = _Documents(replicas=())
    for _ in range(40):
        rounds.after_round((), content, TIMES[rank][counts[-1]], has_waited=True)
    # One line at once: the processes share an output.
    sys.stdout.write(f"process {rank} ran {counts}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
