"""`tlora train`: one run from its configuration to results, on a backbone of our own."""

from __future__ import annotations

from typing import Any

from tlora_megatron import timeline
from tlora_megatron.config.parallel_rules import check_run_over_experts, check_run_without_experts
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.runtime.backbone import (
    base_name,
    model_config,
    model_dir,
    open_backbone,
    ready_process,
)
from tlora_megatron.runtime.live_requests import open_for_requests
from tlora_megatron.runtime.own_replica import check_replicas_fit, own_replica, resolve_round_timing
from tlora_megatron.runtime.recompute_choice import choose_recompute, resolve_lora_sharding
from tlora_megatron.training.events import EventSink
from tlora_megatron.training.formats.quantised import quantisation_card
from tlora_megatron.training.run.environment import frozen_gc
from tlora_megatron.training.run.training_run import TrainingRun
from tlora_megatron.training.stopping.signals import StopSignals


def train_run(
    config: RunConfig, events: EventSink | None = None, signals: StopSignals | None = None
) -> dict[str, Any]:
    """Trains all jobs of a run; called by every process of it.

    Args:
        events: takes what happens, on every rank that has one.
        signals: stop it behind a round; given on every process or on none.

    Returns:
        The content of `OUT/summary.json`; empty on every process but the writer.

    Raises:
        ValueError: for input that cannot be used, before any training.
    """
    timeline.begin_run()
    spec = read_model_spec(model_config(config))
    if spec.experts is None:
        check_run_without_experts(config.parallel)
    else:
        unpredicted = None if spec.gpt_oss is None else spec.model_type
        check_run_over_experts(config, unpredicted=unpredicted)
    own = own_replica(config)
    quantisation = base_quantisation(config.base_model, spec)
    check_replicas_fit(spec, quantisation, own)
    ready_process(config, own.layout)
    with TrainingRun(
        config,
        spec,
        tokenizer_dir=model_dir(config),
        base_model=base_name(config),
        quantisation=quantisation_card(config.base_model, spec, quantisation),
        events=events,
        resolve_sharding=resolve_lora_sharding,
        choose_recompute=choose_recompute,
        resolve_timing=resolve_round_timing,
        signals=signals,
    ) as run:
        if quantisation is not None:
            run.facts["quantization"] = quantisation.describe(spec)
        base = open_backbone(config, spec, own, quantisation, on_loaded=run.check_agreement)
        loop = run.start(base.groups, base.linears, base.engine)
        with open_for_requests(run, base.linears, loop) as on_boundary, frozen_gc():
            loop.run(on_boundary)
        return run.finish()
