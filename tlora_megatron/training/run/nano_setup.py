"""Sets up the nano-batches that a run's configuration asks for."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from tlora_megatron.config.schema import RunSpec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.tensor_collectives import DEFAULT_MAX_BYTES
from tlora_megatron.training.nano.rounds import NanoRounds, NanoSettings
from tlora_megatron.training.nano.trace import NanoTrace
from tlora_megatron.training.super_model import SuperModel

logger = logging.getLogger(__name__)


def nano_settings(
    run: RunSpec, spec: ModelSpec, dtype: torch.dtype, micro_batch_tokens: int | None = None
) -> NanoSettings:
    """Returns the settings that an engine is built with.

    The largest collective carries half a micro-batch plus 25 %, because cuts fall between
    documents.

    Args:
        micro_batch_tokens: budget of this process's replica; None = the run's.
    """
    row_bytes = spec.hidden_size * dtype.itemsize
    max_bytes = min(
        (micro_batch_tokens or run.micro_batch_tokens) * row_bytes * 5 // 8, DEFAULT_MAX_BYTES
    )
    return NanoSettings(transport=run.tensor_collectives, max_bytes=max_bytes)


def start_nano_batches(
    run: RunSpec, super_model: SuperModel, *, resuming: bool, traces: bool = True
) -> NanoRounds | None:
    """Sets the number of nano-batches once the backbone has its adapters.

    Collective over the world.

    Args:
        traces: keep a trace of the choices in the output folder.

    Returns:
        What chooses the number from now on; None where it stays as it is.
    """
    switch, groups = super_model.engine.nano_batches, super_model.groups
    if switch is None or run.nano_batches == 1 or not _all_have_tp(groups):
        return None
    # Two make the engine ready for any number, or say why there can be none.
    switch.set_count(2 if run.nano_batches == "auto" else run.nano_batches)
    if run.nano_batches != "auto" or switch.count == 1:
        return None
    return NanoRounds(
        run.nano_controller,
        switch,
        NanoTrace(Path(run.output_dir)) if traces and groups.is_writer else None,
        jobs=super_model.jobs,
        device=groups.device,
        resuming=resuming,
    )


def _all_have_tp(groups: ParallelGroups) -> bool:
    """True where all ranks are in tensor-parallel groups of one size; collective over the world.

    Numbers of nano-batches are agreed over the world, and replicas of other sizes have none.
    """
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, groups.layout.tp_size)
    if len(set(sizes)) > 1 and groups.is_writer:
        logger.warning(
            "run.nano_batches has no effect, micro-batches run whole: replicas differ in tp_size"
        )
    return len(set(sizes)) == 1 and sizes[0] > 1
