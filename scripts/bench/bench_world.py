"""What the processes of one bench do together but for measuring."""

from __future__ import annotations

import time

import torch.distributed as dist


def say(text: str) -> None:
    """Prints on the first process."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def out_of_time(begin: float, budget_s: float) -> bool:
    """Whether so many seconds have passed since `begin`, by the first process's clock."""
    answer = [time.monotonic() - begin > budget_s]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]
