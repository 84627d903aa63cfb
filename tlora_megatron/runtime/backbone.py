"""Starts CUDA while Python still imports: its context and cuBLAS take a second or two."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron import timeline
from tlora_megatron.config.parallel_rules import check_run_over_experts, check_run_without_experts
from tlora_megatron.config.schema import Recompute, RunConfig, built_recompute
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import Deployment, ParallelLayout, lay_out_world
from tlora_megatron.model.quantisation import (
    BaseQuantisation,
    base_quantisation,
    check_block_layout,
)
from tlora_megatron.model.spec import ModelSpec, refuse_gpt_oss
from tlora_megatron.ops.exactness import keep_rows_apart
from tlora_megatron.ops.frozen import flash4
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.overlap import set_queues
from tlora_megatron.training.formats.hf_convert import Rounding, check_layout
from tlora_megatron.training.nano.rounds import NanoSettings
from tlora_megatron.training.run.determinism import let_segments_grow, set_environment
from tlora_megatron.training.run.fingerprint import check_base_of_run
from tlora_megatron.training.run.training_run import DTYPES, Linears
from tlora_megatron.training.super_model import Engine


def wake_device() -> threading.Thread:
    """Makes this process's GPU ready on a thread; nothing happens where there is none.

    What CUDA reads from the environment must be set before (`parallel.overlap`).
    Whoever uses the device later waits for this, and says what is wrong with it.
    """

    def wake() -> None:
        with suppress(RuntimeError, AssertionError):
            if torch.cuda.is_available():
                device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
                square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
                torch.matmul(square, square)
                torch.cuda.synchronize(device)

    thread = threading.Thread(target=wake, name="wake device", daemon=True)
    thread.start()
    return thread


logger = logging.getLogger(__name__)

_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""What Megatron sets to 1 as it builds a model. glibc moves all variables for a new one, and a
thread that tokenizes asks for one meanwhile: it would read freed memory."""
EXPECTED = 0.0265
"""|D - W| / |W| of normal weights; e4m3 has three bits of mantissa."""
_OUTLIER = 1.25
"""Times `EXPECTED`."""


def log_base(
    quantisation: BaseQuantisation | None, spec: ModelSpec, model: Any, rounding: Rounding
) -> None:
    """Logs a quantised base on the first process; collective over the world."""
    if quantisation is None:
        return
    first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    mine = {_global_name(name, first): error for name, error in rounding.relative().items()}
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (num_bytes, mine))
    if dist.get_rank() != 0:
        return
    logger.info(
        "base: %s; at most %.2f GiB of weights on a rank",
        quantisation.describe(spec), max(size for size, _ in everyone) / 2**30,
    )  # fmt: skip
    if quantisation.published is not None and quantisation.published.rounds_scales:
        logger.warning(
            "the base's scales are powers of two (ue8m0), and servers round activations' scales to "
            "such, too; here they are not rounded"
        )
    lost: dict[str, float] = {}
    for _, found in everyone:
        for name, error in found.items():
            lost[name] = max(error, lost.get(name, 0.0))
    _log_losses(lost)


def _global_name(name: str, first_layer: int) -> str:
    """A stage counts its layers from 0."""
    before, _, after = name.removeprefix("decoder.layers.").partition(".")
    return f"layers.{int(before) + first_layer}.{after.removesuffix('.weight')}"


def _log_losses(lost: Mapping[str, float]) -> None:
    if not lost:
        return
    worst = max(lost, key=lambda name: lost[name])
    logger.info(
        "its weights lose |D - W| / |W| = %.4f to %.4f (about %.3f is normal), most in %s",
        min(lost.values()), lost[worst], EXPECTED, worst,
    )  # fmt: skip
    for name, error in lost.items():
        logger.debug("%s: |D - W| / |W| = %.4f", name, error)
    if found := outliers(lost):
        logger.warning(
            "these lose more than normal weights do; base_model.unquantised may name them: %s",
            ", ".join(f"{name} ({lost[name]:.4f})" for name in found),
        )


def outliers(lost: Mapping[str, float]) -> list[str]:
    """Names the weights that lose more than normal ones do."""
    return [name for name, error in lost.items() if error > EXPECTED * _OUTLIER]


class OwnReplica(NamedTuple):
    """The layout of this process's replica, and all replicas where they are unlike."""

    layout: ParallelLayout
    deployment: Deployment | None
    """None = all are as `layout` says."""
    recompute: Recompute


def own_replica(config: RunConfig, place: tuple[int, int] | None = None) -> OwnReplica:
    """Returns the replica of a process; `place` is as in `know_base`."""
    environ = os.environ.get
    rank, world_size = place or (int(environ("RANK", "0")), int(environ("WORLD_SIZE", "1")))
    deployment = lay_out_world(config.parallel, world_size)
    if isinstance(deployment, ParallelLayout):
        return OwnReplica(deployment, None, built_recompute(config.run))
    own = deployment.placed(rank).layout
    layout = own.parallel_layout(len(deployment.replicas))
    return OwnReplica(layout, deployment, own.recompute or built_recompute(config.run))


def log_replicas(groups: ParallelGroups) -> None:
    """Logs, on the writer, which replica is on which processes, and where gradients are summed."""
    deployment = groups.deployment
    if deployment is None or not groups.is_writer:
        return
    for replica in deployment.placed_replicas():
        first, last = replica.ranks[0], replica.ranks[-1]
        where = f"process {first}" if first == last else f"processes {first} to {last}"
        logger.info("replica %d is %s on %s", replica.index, Deployment((replica.layout,)), where)
    logger.info(
        "%d replicas of %d layouts sum adapters in cells of 1/%d of the columns, between the "
        "stages' borders", len(deployment.replicas), len(deployment.kinds), deployment.atoms,
    )  # fmt: skip


def check_replicas_fit(
    spec: ModelSpec, quantisation: BaseQuantisation | None, own: OwnReplica
) -> None:
    """Refuses layouts that do not divide the model, those of other replicas too."""
    layouts = [own.layout]
    if own.deployment is not None:
        layouts = [kind.parallel_layout(1) for kind in own.deployment.kinds]
        atoms = own.deployment.atoms
        if spec.hidden_size % atoms:
            raise ValueError(
                f"hidden_size must be a multiple of {atoms}, the least common one of the replicas' "
                f"TP sizes, got {spec.hidden_size}"
            )
        if quantisation is not None and not own.deployment.tp_is_alike:
            raise ValueError(
                "parallel.replicas must have one tp_size over an FP8 base, got "
                f"{own.deployment}: a rank's part of a row has a scale of its own, so losses would "
                "follow from the replica that a sequence meets"
            )
    for layout in layouts:
        check_layout(spec, layout)
        if quantisation is not None:
            check_block_layout(spec, quantisation, layout)


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


class KnownBase(NamedTuple):
    """What a process knows of its base before it loads it."""

    spec: ModelSpec
    quantisation: BaseQuantisation | None
    own: OwnReplica


def know_base(
    config: RunConfig, place: tuple[int, int] | None = None, *, refuses_gpt_oss: str = ""
) -> KnownBase:
    """Reads a base's shape, refuses what its layout cannot keep, and starts the device on a thread.

    What libraries read from the environment is set before that.

    Args:
        place: rank of this process and size of its world; None = as torchrun's environment says.
        refuses_gpt_oss: what the base is, where gpt-oss is refused.
    """
    spec = read_model_spec(config.base_model.config_file)
    if refuses_gpt_oss:
        refuse_gpt_oss(spec.model_type, refuses_gpt_oss)
    if spec.experts is None:
        check_run_without_experts(config.parallel)
    else:
        unpredicted = None if spec.gpt_oss is None else spec.model_type
        check_run_over_experts(config, unpredicted=unpredicted)
    own = own_replica(config, place)
    quantisation = base_quantisation(config.base_model, spec)
    check_replicas_fit(spec, quantisation, own)
    set_environment(config.run.deterministic)
    if config.run.recompute == "auto":
        let_segments_grow()
    set_queues(overlaps=_overlaps(config, own.layout))
    keep_rows_apart()
    flash4.keep_compiled()
    for name in _ATTENTION:
        os.environ.setdefault(name, "1")
    wake_device()
    return KnownBase(spec, quantisation, own)


def import_backbone() -> None:
    """Imports Megatron-core and what is built on it."""
    try:
        from tlora_megatron.integrations.megatron.imports import lazy_compile

        with timeline.phase("imports"), lazy_compile(), flash4.hidden():
            import tlora_megatron.integrations.megatron.engine  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(_TRITON) from error


def open_backbone(
    config: RunConfig,
    base: KnownBase,
    *,
    rendezvous: Rendezvous | None = None,
    on_loaded: Callable[[], None] = lambda: None,
) -> OpenBackbone:
    """Joins the process groups, loads the frozen weights and checks them; collective.

    Args:
        rendezvous: where the world meets; None = as torchrun's environment says.
        on_loaded: called once the weights are there, before they are used.
    """
    import_backbone()
    from tlora_megatron.integrations.megatron import engine as recompute
    from tlora_megatron.integrations.megatron import model as backbone
    from tlora_megatron.integrations.megatron import process_groups
    from tlora_megatron.integrations.megatron.engine import MegatronEngine, pair_linears

    spec, quantisation, own = base
    layout, deployment = own.layout, own.deployment
    if rendezvous is not None:
        process_groups.join_process_group(*rendezvous)
    overlaps = _overlaps(config, layout)
    process_groups.initialize_parallel(layout, overlaps=overlaps, deployment=deployment)
    if config.parallel.cp_by_micro_batch and layout.cp_size > 1:
        process_groups.make_narrower_groups(layout)
    with_experts = spec.experts is not None
    groups = process_groups.current_groups(
        layout, deployment, num_layers=spec.num_layers, with_experts=with_experts
    )
    log_replicas(groups)
    is_lone = layout.dp_size * layout.cp_size == 1
    if config.parallel.shard_optimizer and is_lone and groups.is_writer:
        logger.warning("parallel.shard_optimizer has no effect with one replica")
    dtype = DTYPES[config.base_model.dtype]
    with timeline.phase("base"):
        model = backbone.build_backbone(
            spec,
            layout,
            dtype=dtype,
            recompute=own.recompute,
            quantisation=quantisation,
        )
        source = config.base_model
        weights = None if source.random_init else source.folder
        rounding = backbone.load_backbone(
            model, spec, weights, layout, seed=source.seed, quantisation=quantisation
        )
    log_base(quantisation, spec, model, rounding)
    on_loaded()
    recompute.install()
    sites = stage_sites(
        spec, layout, tp_rank=groups.tp_rank, pp_rank=groups.pp_rank, place=groups.expert_place
    )
    budget = groups.budgets(config.run.micro_batch_tokens)[groups.dp_rank]
    nano = NanoSettings.of_run(config.run, spec, dtype, budget)
    engine = MegatronEngine(model, groups, spec.vocab_size, nano)
    with timeline.phase("base"):
        check_base_of_run(engine, groups, config, in_fp8=quantisation is not None)
    return OpenBackbone(groups, pair_linears(model, sites), engine)


def _overlaps(config: RunConfig, layout: ParallelLayout) -> bool:
    """True if nano-batches are going to hide each other's communication."""
    return config.run.nano_batches != 1 and layout.tp_size > 1
