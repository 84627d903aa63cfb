"""`tlora train`: one run from its configuration to results, on a backbone of our own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlora_megatron import timeline
from tlora_megatron.config.load import RunConfig
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import BaseQuantisation, base_quantisation
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano.hardware_queues import set_queues
from tlora_megatron.runtime.base_log import log_base
from tlora_megatron.runtime.dispatch_rates import resolve_round_timing
from tlora_megatron.runtime.lora_sharding import resolve_lora_sharding
from tlora_megatron.runtime.own_replica import (
    OwnReplica,
    check_replicas_fit,
    log_replicas,
    own_replica,
)
from tlora_megatron.runtime.recompute_choice import choose_recompute
from tlora_megatron.runtime.wake import wake_device
from tlora_megatron.training.fingerprint.check import check_base_of_run
from tlora_megatron.training.formats.quantised.card import quantisation_card
from tlora_megatron.training.listener import RunListener
from tlora_megatron.training.run.environment import set_environment
from tlora_megatron.training.run.nano_setup import nano_settings
from tlora_megatron.training.run.training_run import DTYPES, Linears, TrainingRun
from tlora_megatron.training.stopping.signals import StopSignals
from tlora_megatron.training.super_model import Engine

_TRITON = (
    "this megatron-core needs triton, which CPU builds of torch leave out; "
    "pip install triton or pip install 'megatron-core<0.18'"
)


def train_run(
    config: RunConfig, listener: RunListener, signals: StopSignals | None = None
) -> dict[str, Any]:
    """Trains all jobs of a run; called by every process of it.

    Args:
        signals: stop it behind a round; given on every process or on none.

    Returns:
        The content of `OUT/summary.json`; empty on every process but the writer.

    Raises:
        ValueError: for input that cannot be used, before any training.
    """
    timeline.begin_run()
    spec = read_model_spec(_model_config(config))
    own = own_replica(config)
    quantisation = base_quantisation(config.base_model, spec)
    check_replicas_fit(spec, quantisation, own)
    set_environment(config.run.deterministic)
    set_queues(overlaps=_overlaps(config, own.layout))
    wake_device()
    with TrainingRun(
        config,
        spec,
        tokenizer_dir=_model_dir(config),
        base_model=config.base_model.path or str(_model_dir(config)),
        quantisation=quantisation_card(config.base_model, spec, quantisation),
        listener=listener,
        resolve_sharding=resolve_lora_sharding,
        choose_recompute=choose_recompute,
        resolve_timing=resolve_round_timing,
        signals=signals,
    ) as run:
        if quantisation is not None:
            run.facts["quantization"] = quantisation.describe(spec)
        groups, linears, engine = _build(run, spec, own, quantisation)
        with timeline.phase("base"):
            check_base_of_run(engine, groups, config, in_fp8=quantisation is not None)
        loop = run.start(groups, linears, engine)
        with frozen_gc():
            loop.run()
        return run.finish()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Hides all objects made so far from Python's garbage collector.

    Tapes of nano-batches are thousands of small objects a step, each step sets the collector off,
    and it would look through a whole model's again and again (a fifth of the host's time for cuts).
    Turns the collector on, where the start of a run went without it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.unfreeze()


def _model_config(config: RunConfig) -> Path:
    base = config.base_model
    return Path(base.path) / "config.json" if base.path is not None else Path(str(base.config))


def _model_dir(config: RunConfig) -> Path:
    """The folder of the tokenizer and, unless they are drawn, the weights."""
    return _model_config(config).parent


def _overlaps(config: RunConfig, layout: ParallelLayout) -> bool:
    """True if nano-batches are going to hide each other's communication."""
    return config.run.nano_batches != 1 and layout.tp_size > 1


def import_backbone() -> None:
    """Imports Megatron-core and what is built on it.

    Raises:
        ImportError: if it is missing, or needs triton.
    """
    try:
        from tlora_megatron.integrations.megatron.lazy_compile import lazy_compile

        with timeline.phase("imports"), lazy_compile():
            import tlora_megatron.integrations.megatron.engine
            import tlora_megatron.integrations.megatron.recompute  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(_TRITON) from error


def _build(
    run: TrainingRun,
    spec: ModelSpec,
    own: OwnReplica,
    quantisation: BaseQuantisation | None,
) -> tuple[ParallelGroups, Linears, Engine]:
    """Sets up processes and backbone; returns groups, linears and engine."""
    import_backbone()
    from tlora_megatron.integrations.megatron import cp_groups, recompute
    from tlora_megatron.integrations.megatron import model as backbone
    from tlora_megatron.integrations.megatron.engine import (
        MegatronEngine,
        current_groups,
        pair_linears,
    )

    config, layout, deployment = run.config, own.layout, own.deployment
    backbone.initialize_parallel(layout, overlaps=_overlaps(config, layout), deployment=deployment)
    if config.parallel.cp_by_micro_batch and layout.cp_size > 1:
        cp_groups.make_narrower_groups(layout)
    groups = current_groups(layout, deployment, num_layers=spec.num_layers)
    log_replicas(groups)
    dtype = DTYPES[config.base_model.dtype]
    with timeline.phase("base"):
        model = backbone.build_backbone(
            spec,
            layout,
            dtype=dtype,
            recompute=own.recompute,
            quantisation=quantisation,
        )
        weights = None if config.base_model.random_init else _model_dir(config)
        seed = config.base_model.seed
        rounding = backbone.load_backbone(
            model, spec, weights, layout, seed=seed, quantisation=quantisation
        )
    log_base(quantisation, spec, model, rounding)
    run.check_agreement()
    recompute.install()
    sites = stage_sites(spec, layout, tp_rank=groups.tp_rank, pp_rank=groups.pp_rank)
    budget = groups.budgets(config.run.micro_batch_tokens)[groups.dp_rank]
    nano = nano_settings(config.run, spec, dtype, budget)
    engine = MegatronEngine(model, groups, spec.vocab_size, nano)
    return groups, pair_linears(model, sites), engine
