"""Joins the processes of a run, and returns their places in DeepSpeed's groups."""

from __future__ import annotations

import os
import socket

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups

from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.exactness import keep_rows_apart
from tlora_megatron.parallel.groups import ParallelGroups


def join_processes() -> None:
    """Joins the process group of the launcher's environment, or a world of one without a launcher.

    NCCL where there is CUDA, else gloo. A process group that is there already is kept.
    """
    if not torch.cuda.is_available():
        keep_rows_apart()
        # Compiled in the first process group on every CPU, for inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def current_groups(tp_size: int) -> ParallelGroups:
    """Returns this process's place in the groups that DeepSpeed has made."""
    world = dist.get_world_size()
    layout = ParallelLayout.for_world(
        world, tp_size=tp_size, pp_size=1, cp_size=1, sequence_parallel=False
    )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if tp_size > 1:
        tp_group = deepspeed_groups.get_tensor_model_parallel_group()
        dp_group = deepspeed_groups.get_data_parallel_group()
    else:
        tp_group = _group_of_one()
        dp_group = dist.group.WORLD
    return ParallelGroups(
        layout=layout,
        tp_rank=dist.get_rank(tp_group),
        pp_rank=0,
        cp_rank=0,
        dp_rank=dist.get_rank(dp_group),
        tp_group=tp_group,
        dp_cp_group=dp_group,
        model_group=tp_group,
        device=device,
    )


def _group_of_one() -> dist.ProcessGroup:
    """Makes a group of this process alone; every process makes all such groups."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]
