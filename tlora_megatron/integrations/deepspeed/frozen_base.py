"""The base model under DeepSpeed: its processes, and a model built once while jobs come and go."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.integrations.deepspeed import discover
from tlora_megatron.integrations.deepspeed import model as models
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.discover import check_run_over_experts, prepare_linear
from tlora_megatron.integrations.deepspeed.engine import (
    DeepSpeedEngine,
    check_packing,
    prepare_output_layer,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.slab import StatePlacement
from tlora_megatron.model.backbone import LinearsSpec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.exactness import keep_rows_apart
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.fingerprint.check import check_base_of_run


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


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBase:
    """A frozen model, sharded by DeepSpeed and ready for adapters."""

    model: Any
    deepspeed: Any
    """DeepSpeed's engine around the model."""
    spec: LinearsSpec
    groups: ParallelGroups
    linears: tuple[tuple[Site, nn.Module], ...]
    engine: DeepSpeedEngine
    placement: StatePlacement
    """Place of the adapters' master weights and moments, by the ZeRO stage."""


def base_of_model(model: Any) -> BaseModelSpec:
    """Describes a model that the caller has built, like the section `base_model`.

    Raises:
        ValueError: if its weights are neither fp32 nor bf16.
    """
    dtypes = {p.dtype for p in model.parameters()}
    if dtypes == {torch.bfloat16}:
        return BaseModelSpec(path=model.name_or_path or None, dtype="bfloat16")
    if dtypes == {torch.float32}:
        return BaseModelSpec(path=model.name_or_path or None, dtype="float32")
    raise ValueError(f"the model's weights must be all float32 or all bfloat16, got {dtypes}")


def build_base(config: DeepSpeedConfig, model: Any | None = None) -> FrozenBase:
    """Reads the base, unless it is given, and puts it under DeepSpeed; collective over the world.

    Raises:
        ValueError: if the model is not supported, saying why.
    """
    tp_size = config.tp_size
    if dist.get_world_size() % tp_size:
        raise ValueError(
            f"tensor_parallel.autotp_size must divide the {dist.get_world_size()} processes, "
            f"got {tp_size}"
        )
    is_given = model is not None
    if model is None:
        model = models.load_model(config.run.base_model, config.engine, tp_size=tp_size)
    models.refuse_adapters(model)
    check_run_over_experts(model, config)
    models.turn_dropout_off(model)
    whole_spec = discover.model_spec(model)
    plain = model.config._attn_implementation
    deepspeed = models.start_engine(model, config.engine)
    models.check_finite(model)
    groups = current_groups(tp_size)
    spec = discover.sharded_spec(model, whole_spec, groups)
    models.require_grad_from_embedding(model)
    models.use_packed_attention(model)
    prepare_output_layer(model, spec.vocab_size, groups)
    check_packing(model, spec, groups, plain)
    if not is_given:  # a program's own model may differ from its folder
        check_base_of_run(DeepSpeedEngine(model, groups), groups, config.run)
    if config.run.run.recompute == "full":
        models.recompute_layers(model)
    linears = tuple(discover.pair_linears(model, spec, groups))
    for _, module in linears:
        prepare_linear(module)
    return FrozenBase(
        model=model,
        deepspeed=deepspeed,
        spec=spec,
        groups=groups,
        linears=linears,
        engine=DeepSpeedEngine(model, groups),
        placement=StatePlacement.over_replicas(
            groups, shards=config.stage > 0, on_cpu=config.offload_optimizer
        ),
    )
