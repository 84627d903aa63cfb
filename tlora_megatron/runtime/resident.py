"""Opens a super-model that stays while its jobs come and go, on the processes of one world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tlora_megatron import timeline
from tlora_megatron.config.deterministic import exact_shardings
from tlora_megatron.config.job import HF_TARGETS, LoraSpec
from tlora_megatron.config.jobs import read_job
from tlora_megatron.config.load import RunConfig, fit_job
from tlora_megatron.layers.adapter_bank import AdapterBank, BankShape
from tlora_megatron.layers.attach import attach
from tlora_megatron.model.quantisation import base_quantisation
from tlora_megatron.model.spec import ModelSpec, read_model_spec
from tlora_megatron.ops.exactness import exactness_of
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.runtime.backbone import (
    Rendezvous,
    base_name,
    model_config,
    model_dir,
    open_backbone,
    ready_process,
)
from tlora_megatron.runtime.lora_sharding import resolve_lora_sharding
from tlora_megatron.runtime.own_replica import check_replicas_fit, own_replica
from tlora_megatron.training.data.job_data import load_tokenizer
from tlora_megatron.training.formats.quantised.card import QuantisationCard, quantisation_card
from tlora_megatron.training.nano.rounds import rank_aware_cut
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.preparation import PreparedJob
from tlora_megatron.training.resident.live_loop import LiveLoop, Tell
from tlora_megatron.training.resident.loop import ResidentLoop
from tlora_megatron.training.resident.staging import Order, ReadOrder, Stager
from tlora_megatron.training.run.job_admission import check_fits_linears, prepare_for
from tlora_megatron.training.run.nano_setup import start_nano_batches
from tlora_megatron.training.run.training_run import DTYPES, Linears, allow_open_files
from tlora_megatron.training.stopping.run_watch import RunWatch
from tlora_megatron.training.super_model import Engine, SuperModel

_MANY_JOBS = 256
"""Files of so many jobs may be open at once."""
_USUAL_RANK, _SAVED_AT_ONCE = 64, 2
"""Memory for so many snapshots of jobs of this rank is there from the start, if the host has it: to
get more, a join of a larger job waits until everything is written."""
_KEPT_RANKS, _KEPT_SHARE, _KEPT_BYTES = 1024, 0.05, 256e6
"""Room in the arenas that joining jobs find without a copy of the others: for 16 jobs of rank 64,
but at most this share of a GPU's memory, or so many bytes without one. 16 jobs of rank 64 on all
linears of an 8B model are 5.4 GB in bf16."""
_AGREE_TIMEOUT = timedelta(days=1)
"""The others wait so long for the first rank's word; an idle one speaks every few seconds."""


@contextmanager
def open_resident(
    config: RunConfig,
    *,
    tell: Tell,
    rendezvous: Rendezvous | None = None,
    read_order: ReadOrder | None = None,
    may_write: Callable[[str], bool] = lambda _: True,
    targets: Sequence[str] = HF_TARGETS,
    allows_blocks: bool = False,
) -> Iterator[ResidentLoop]:
    """Loads the base on this process and opens it for jobs; every process of the world calls it.

    Args:
        config: from `config.load.read_gang_config`; it has no jobs.
        tell: is told of events on the first rank; of `out_of_memory` on any.
        rendezvous: where the world meets; None = as torchrun's environment says.
        read_order: reads all that a job starts from, on every rank, on a thread; None = tokenizes
            its files, and goes on from the newest checkpoint in its folder.
        may_write: asked by a job's name, on the first rank and on several of its threads, right
            before anything in the job's folder changes.
        targets: that jobs may adapt.
        allows_blocks: jobs may have block-diagonal adapters.

    Raises:
        ValueError: if the base or the layout cannot be used.
    """
    timeline.begin_run()
    spec = read_model_spec(model_config(config))
    place = {} if rendezvous is None else {"rank": rendezvous.rank}
    own = own_replica(config, **place, world_size=rendezvous and rendezvous.world_size)
    quantisation = base_quantisation(config.base_model, spec)
    check_replicas_fit(spec, quantisation, own)
    ready_process(config, own.layout)
    card = quantisation_card(config.base_model, spec, quantisation)
    read_order = read_order or _order_reader(config, spec, card)
    base = open_backbone(config, spec, own, quantisation, rendezvous=rendezvous)
    groups, linears = resolve_lora_sharding(
        _with_exact_sharding(config), spec, base.groups, base.linears, ()
    )
    blocks = frozenset(targets if allows_blocks else ())
    kept_ranks = _kept_ranks(spec, groups, targets, DTYPES[config.base_model.dtype])
    shape = BankShape(targets=frozenset(targets), block_targets=blocks, kept_ranks=kept_ranks)
    super_model = _open_super_model(config, spec, groups, linears, base.engine, shape)
    check = partial(_check, config, shape, spec, groups, linears)
    watch = RunWatch.open(None, config.run.hang_timeout_s)
    allow_open_files(_MANY_JOBS)
    live = LiveLoop(
        super_model,
        spec,
        config.run,
        tell,
        base_model=base_name(config),
        quantisation=card,
        nano_rounds=start_nano_batches(config.run, super_model, resuming=False, traces=False),
        watch=watch,
        may_write=may_write,
    )
    live.saver.expect(*[LoraSpec(rank=_USUAL_RANK, target_modules=tuple(targets))] * _SAVED_AT_ONCE)
    group = None
    if dist.get_world_size() > 1:
        group = dist.new_group(backend="gloo", timeout=_AGREE_TIMEOUT)
    loop = ResidentLoop(
        live,
        Stager(super_model.bank, spec, read_order, check, live.files.open_metrics),
        group,
        tell,
    )
    try:
        yield loop
    finally:
        loop.close()
        watch.close()


def _with_exact_sharding(config: RunConfig) -> RunConfig:
    """Chooses, where the sharding is left open, one that keeps neighbours' bits."""
    parallel = config.parallel
    if parallel.lora_sharding != "auto":
        return config
    sharding = exact_shardings(parallel.any_sequence_parallel)[0]
    return replace(config, parallel=replace(parallel, lora_sharding=sharding))


def _kept_ranks(
    spec: ModelSpec, groups: ParallelGroups, targets: Sequence[str], dtype: torch.dtype
) -> int:
    """Ranks for which the bank keeps memory; see `BankShape.kept_ranks`."""
    layout, budget = groups.layout, _KEPT_BYTES
    if groups.device.type == "cuda":
        budget = _KEPT_SHARE * torch.cuda.mem_get_info(groups.device)[1]
    whole = spec.num_layers * sum(sum(spec.target_shape(target)) for target in targets)
    rank_bytes = whole * dtype.itemsize / (layout.tp_size * layout.pp_size)
    return max(1, min(_KEPT_RANKS, int(budget // rank_bytes)))


def _open_super_model(
    config: RunConfig,
    spec: ModelSpec,
    groups: ParallelGroups,
    linears: Linears,
    engine: Engine,
    shape: BankShape,
) -> SuperModel:
    sites, dtype = [site for site, _ in linears], DTYPES[config.base_model.dtype]
    bank = AdapterBank(sites, shape, dtype=dtype, device=groups.device)
    attach(linears, bank)
    return SuperModel(
        engine,
        bank,
        groups,
        [],
        micro_batch_tokens=groups.budgets(config.run.micro_batch_tokens)[groups.dp_rank],
        round_shape=RoundShape(exactness=exactness_of(config.run.deterministic)),
        cut_for=partial(rank_aware_cut, spec),
    )


def _order_reader(
    config: RunConfig, spec: ModelSpec, quantisation: QuantisationCard | None
) -> ReadOrder:
    """Reads the files that an order's document names."""
    # Here: threads that import at once can meet half a module.
    tokenizer = load_tokenizer(model_dir(config))

    def read(order: Order) -> PreparedJob:
        document = {**order["document"], "name": order["job"]}
        job = fit_job(read_job(document, Path.cwd(), path=f"job {order['job']}"), config)
        return prepare_for(
            config,
            spec,
            job,
            tokenizer,
            base_model=base_name(config),
            quantisation=quantisation,
            resuming=True,
        )

    return read


def _check(
    config: RunConfig,
    shape: BankShape,
    spec: ModelSpec,
    groups: ParallelGroups,
    linears: Linears,
    prepared: PreparedJob,
) -> None:
    """Refuses a job that this super-model has no place for."""
    job = prepared.spec
    fit_job(job, config)
    shape.check_holds(job.name, job.lora)
    check_fits_linears(job, spec, groups.layout, linears)
