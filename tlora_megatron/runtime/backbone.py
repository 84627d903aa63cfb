"""Opens a backbone of our own: process groups, frozen weights, and the linears for adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tlora_megatron import timeline
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano.overlap import set_queues
from tlora_megatron.runtime.base_log import log_base
from tlora_megatron.runtime.own_replica import OwnReplica, log_replicas, warn_of_sharding
from tlora_megatron.runtime.wake import wake_device
from tlora_megatron.training.fingerprint.check import check_base_of_run
from tlora_megatron.training.run.environment import let_segments_grow, set_environment
from tlora_megatron.training.run.nano_setup import nano_settings
from tlora_megatron.training.run.training_run import DTYPES, Linears
from tlora_megatron.training.super_model import Engine

_TRITON = (
    "this megatron-core needs triton, which CPU builds of torch leave out; "
    "pip install triton or pip install 'megatron-core<0.18'"
)


class Rendezvous(NamedTuple):
    """Where the processes of a world meet, if torchrun's environment does not say it."""

    store: dist.Store
    rank: int
    world_size: int


class OpenBackbone(NamedTuple):
    """A backbone that is ready for adapters, on this process."""

    groups: ParallelGroups
    linears: Linears
    engine: Engine


def model_config(config: RunConfig) -> Path:
    """The base's `config.json`."""
    return config.base_model.config_file


def model_dir(config: RunConfig) -> Path:
    """The folder of the tokenizer and, unless they are drawn, the weights."""
    return config.base_model.folder


def base_name(config: RunConfig) -> str:
    """Returns the name that exported adapters give their base."""
    return config.base_model.path or str(model_dir(config))


def ready_process(config: RunConfig, layout: ParallelLayout) -> None:
    """Sets what libraries read from the environment, then starts the device on a thread."""
    set_environment(config.run.deterministic)
    if config.run.recompute == "auto":
        let_segments_grow()
    set_queues(overlaps=_overlaps(config, layout))
    wake_device()


def import_backbone() -> None:
    """Imports Megatron-core and what is built on it.

    Raises:
        ImportError: if it is missing, or needs triton.
    """
    try:
        from tlora_megatron.integrations.megatron.lazy_compile import lazy_compile

        with timeline.phase("imports"), lazy_compile():
            import tlora_megatron.integrations.megatron.engine  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(_TRITON) from error


def open_backbone(
    config: RunConfig,
    spec: ModelSpec,
    own: OwnReplica,
    quantisation: BaseQuantisation | None,
    *,
    rendezvous: Rendezvous | None = None,
    on_loaded: Callable[[], None] = lambda: None,
) -> OpenBackbone:
    """Joins the process groups, loads the frozen weights and checks them; collective.

    Args:
        rendezvous: where the world meets; None = as torchrun's environment says.
        on_loaded: called once the weights are there, before they are used.

    Raises:
        ValueError: if the base cannot be used in this layout.
    """
    import_backbone()
    from tlora_megatron.integrations.megatron import engine as recompute
    from tlora_megatron.integrations.megatron import model as backbone
    from tlora_megatron.integrations.megatron import process_groups
    from tlora_megatron.integrations.megatron.engine import (
        MegatronEngine,
        current_groups,
        pair_linears,
    )

    layout, deployment = own.layout, own.deployment
    if rendezvous is not None:
        backbone.join_process_group(*rendezvous)
    backbone.initialize_parallel(layout, overlaps=_overlaps(config, layout), deployment=deployment)
    if config.parallel.cp_by_micro_batch and layout.cp_size > 1:
        process_groups.make_narrower_groups(layout)
    with_experts = spec.experts is not None
    groups = current_groups(
        layout, deployment, num_layers=spec.num_layers, with_experts=with_experts
    )
    log_replicas(groups)
    warn_of_sharding(config, groups)
    dtype = DTYPES[config.base_model.dtype]
    with timeline.phase("base"):
        model = backbone.build_backbone(
            spec,
            layout,
            dtype=dtype,
            recompute=own.recompute,
            quantisation=quantisation,
        )
        weights = None if config.base_model.random_init else model_dir(config)
        seed = config.base_model.seed
        rounding = backbone.load_backbone(
            model, spec, weights, layout, seed=seed, quantisation=quantisation
        )
    log_base(quantisation, spec, model, rounding)
    on_loaded()
    recompute.install()
    sites = stage_sites(
        spec, layout, tp_rank=groups.tp_rank, pp_rank=groups.pp_rank, place=groups.expert_place
    )
    budget = groups.budgets(config.run.micro_batch_tokens)[groups.dp_rank]
    nano = nano_settings(config.run, spec, dtype, budget)
    engine = MegatronEngine(model, groups, spec.vocab_size, nano)
    with timeline.phase("base"):
        check_base_of_run(engine, groups, config, in_fp8=quantisation is not None)
    return OpenBackbone(groups, pair_linears(model, sites), engine)


def _overlaps(config: RunConfig, layout: ParallelLayout) -> bool:
    """True if nano-batches are going to hide each other's communication."""
    return config.run.nano_batches != 1 and layout.tp_size > 1
