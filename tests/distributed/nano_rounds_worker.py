"""Worker: processes with different times and room choose nano-batches; prints what each ran."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tlora_megatron.parallel.nano.lane_room import LaneRoom
from tlora_megatron.training.nano.rounds import NanoRounds
from tlora_megatron.training.packing.packing import Bins

MOST = (4, 2)
"""That each process has room for."""
TIMES = ({1: 1.0, 2: 0.7, 3: 0.5, 4: 0.4}, {1: 0.9, 2: 0.8, 3: 0.5, 4: 0.4})
"""Of a round in so many, in seconds."""


class _Documents(Bins):
    num_tokens = 1000
    most_documents = 8


def main() -> None:
    """Runs 40 rounds."""
    dist.init_process_group("gloo")
    rank, counts = dist.get_rank(), []
    rounds = NanoRounds(
        "best",
        counts.append,
        jobs=(),
        device=torch.device("cpu"),
        output_dir=Path(sys.argv[1]),
        is_writer=rank == 0,
        resuming=False,
        room=lambda: LaneRoom(MOST[rank], 1e9 * MOST[rank]),
    )
    content: Any = _Documents(num_micro_batches=1, dp_size=1, contents=())
    for _ in range(40):
        rounds.after_round((), content, TIMES[rank][counts[-1]], has_waited=True)
    # One line at once: the processes share an output.
    sys.stdout.write(f"process {rank} ran {counts}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
