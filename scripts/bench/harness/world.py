"""Agreement between the processes of one benchmark: who prints, when to end, sums and maxima."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def is_main() -> bool:
    """True on the first process, which prints and writes rows."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text: str) -> None:
    """Prints on the first process, at once."""
    if is_main():
        print(text, flush=True)


def out_of_time(begin: float, budget_s: float) -> bool:
    """True once so many seconds have passed since `begin`, by the first process's clock."""
    answer = [time.monotonic() - begin > budget_s]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def largest(values: list[float]) -> list[float]:
    """The largest of each value over the processes."""
    return _reduced(values, dist.ReduceOp.MAX)


def summed(values: list[float]) -> list[float]:
    """The sum of each value over the processes."""
    return _reduced(values, dist.ReduceOp.SUM)


def _reduced(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()
