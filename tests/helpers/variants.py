"""Variants of a worker such as `tp=2,sp=1,recompute=full`, and how a worker ends its world."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tlora_megatron.model.layout import ParallelLayout


def options_of(variant: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in variant.split(",") if item)


def layout_of(options: dict[str, str]) -> ParallelLayout:
    tp_size, pp_size, cp_size, ep_size = (int(options.get(x, 1)) for x in ("tp", "pp", "cp", "ep"))
    layout = ParallelLayout(
        tp_size=tp_size, pp_size=pp_size, cp_size=cp_size, ep_size=ep_size,
        sequence_parallel="sp" in options,
        expert_tp_size=int(options["etp"]) if "etp" in options else None,
    )  # fmt: skip
    return layout.for_world(int(os.environ.get("WORLD_SIZE", "1")))


def begin_world() -> torch.device:
    """Joins the world, over NCCL where there are GPUs; returns this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def end_world(*said: str) -> None:
    """Takes the process group down when all ranks are done; the first one prints."""
    dist.barrier()
    if said and dist.get_rank() == 0:
        print(*said, flush=True)
    dist.destroy_process_group()
