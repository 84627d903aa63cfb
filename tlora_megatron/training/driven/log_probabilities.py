"""Brings the log-probabilities of clients' tokens from the micro-batches that ran them together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.training.driven.state import DrivenState
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.packing.packing import MicroBatch, Placed


def collect(
    jobs: Sequence[JobState],
    micro_batch: MicroBatch,
    items: Sequence[Placed],
    nll_T: torch.Tensor,
) -> None:
    """Keeps the values of clients' rows with the requests that they belong to.

    Args:
        jobs: in slot order.
        items: of the micro-batch, as they were packed.
        nll_T: negative log-probabilities of the rows that ran; anything in other jobs' rows.
    """
    nll_T = micro_batch.restore_order(nll_T)
    begin, found = 0, dict[int, tuple[list[np.ndarray], list[np.ndarray]]]()
    for piece in micro_batch.packed.view.pieces:
        rows = np.arange(begin, begin + piece.length)
        begin += piece.length
        if piece.index >= len(items):  # padding
            continue
        slot, item, _ = items[piece.index]
        if item.sent is not None:
            here, there = found.setdefault(slot, ([], []))
            here.append(rows)
            there.append(rows - rows[0] + item.first_token + piece.offset)
    for slot, (here, there) in found.items():
        job = jobs[slot]
        assert isinstance(job, DrivenState) and job.running is not None, "rows have a request"  # noqa: PT018
        here_R, there_R = (
            to_device(torch.from_numpy(np.concatenate(rows)), nll_T.device)
            for rows in (here, there)
        )
        job.running.nll_T[there_R] = nll_T[here_R]


def gathered(states: Sequence[DrivenState]) -> list[np.ndarray]:
    """Log-probabilities of the tokens of each job's request, fp32 `[T]`; waits for the device.

    Collective over the world: one all-reduce. Every token ran on one rank that counts, so that
    nothing is rounded.
    """
    parts = [state.running.nll_T for state in states if state.running is not None]
    assert len(parts) == len(states), "only requests that run have values"
    joined = torch.cat(parts)
    dist.all_reduce(joined)
    values = -joined.cpu().numpy()
    return np.split(values, np.cumsum([len(part) for part in parts])[:-1])
