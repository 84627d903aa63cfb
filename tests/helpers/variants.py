"""Variants of a worker such as `tp=2,sp=1,recompute=full`, and how a worker ends its world."""

from __future__ import annotations

import os

import torch.distributed as dist

from tlora_megatron.model.layout import ParallelLayout


def options_of(variant: str) -> dict[str, str]:
    """The words of a variant by name."""
    return dict(item.split("=", 1) for item in variant.split(",") if item)


def layout_of(options: dict[str, str]) -> ParallelLayout:
    """The layout that a variant names, over all processes."""
    return ParallelLayout.for_world(
        int(os.environ.get("WORLD_SIZE", "1")), tp_size=int(options.get("tp", 1)),
        pp_size=int(options.get("pp", 1)), cp_size=int(options.get("cp", 1)),
        sequence_parallel="sp" in options, ep_size=int(options.get("ep", 1)),
        expert_tp_size=int(options["etp"]) if "etp" in options else None,
    )  # fmt: skip


def end_world(*said: str) -> None:
    """Takes the process group down when all ranks are done; the first one prints."""
    dist.barrier()
    if said and dist.get_rank() == 0:
        print(*said, flush=True)
    dist.destroy_process_group()
