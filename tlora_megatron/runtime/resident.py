"""Opens a super-model that stays while its jobs come and go, on the processes of one world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron import timeline
from tlora_megatron.config.job import EXPERT_TARGETS, FUSED_EXPERT_TARGETS, LoraSpec
from tlora_megatron.config.load import fit_job
from tlora_megatron.config.parallel_rules import check_job_over_experts, exact_shardings
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.layers.adapter_bank import AdapterBank, BankShape
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.slab import StatePlacement
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.exactness import exactness_of
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.runtime.backbone import Rendezvous, know_base, open_backbone
from tlora_megatron.runtime.choices import resolve_lora_sharding
from tlora_megatron.training.driven_requests import Clients
from tlora_megatron.training.formats.quantised import QuantisationCard, quantisation_card
from tlora_megatron.training.job_files import JobFiles
from tlora_megatron.training.loop import Loop
from tlora_megatron.training.metrics import EventSink
from tlora_megatron.training.nano.rounds import rank_aware_cut, start_nano_batches
from tlora_megatron.training.packing.packing import RoundShape
from tlora_megatron.training.resident.commands import JobCommands
from tlora_megatron.training.resident.staging import ReadOrder, Stager
from tlora_megatron.training.run.determinism import ENVIRONMENT, check_deterministic
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.run.reading import check_fits_linears
from tlora_megatron.training.run.training_run import DTYPES, Linears, allow_open_files
from tlora_megatron.training.run_watch import RunWatch
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
    events: EventSink,
    read_order: ReadOrder,
    rendezvous: Rendezvous | None = None,
    may_write: Callable[[str], bool] = lambda _: True,
    clients: Clients | None = None,
) -> Iterator[JobCommands]:
    """Loads the base on this process and opens it for jobs; every process of the world calls it.

    Args:
        config: from `config.load.read_gang_config`; it has no jobs.
        read_order: reads all that a job starts from, on every rank, on a thread.
        rendezvous: where the world meets; None = as torchrun's environment says.
        may_write: asked by a job's name, on the first rank and on several of its threads, right
            before anything in the job's folder changes.
        clients: who keeps the requests of driven jobs; None = there are no such jobs.
    """
    opened = _open_base(config, rendezvous)
    held = frozenset(opened.spec.peft_targets)
    kept = _kept_ranks(opened, held)
    shape = BankShape(targets=held, block_targets=frozenset(), kept_ranks=kept)
    watch = RunWatch.open(None, config.run.hang_timeout_s)
    loop = _make_loop(opened, shape, events, watch, may_write)
    bank = loop.super_model.bank
    check = partial(_check, opened, bank.shape)
    stager = Stager(bank, opened.spec, read_order, check, loop.files.open_metrics)
    group = None
    if dist.get_world_size() > 1:
        group = dist.new_group(backend="gloo", timeout=_AGREE_TIMEOUT)
    commands = JobCommands(loop, stager, group, clients=clients)
    try:
        yield commands
    finally:
        commands.close()
        loop.saves.close()
        watch.close()


class _Opened(NamedTuple):
    """A base that is loaded, in the sharding that adapters will have."""

    config: RunConfig
    spec: ModelSpec
    card: QuantisationCard | None
    groups: ParallelGroups
    linears: Linears
    engine: Engine


def _open_base(config: RunConfig, rendezvous: Rendezvous | None) -> _Opened:
    timeline.begin_run()
    # On CPUs, too, a job has its bits in any company; MKL reads this at its first product.
    os.environ.setdefault("MKL_CBWR", ENVIRONMENT["MKL_CBWR"])
    place = None if rendezvous is None else rendezvous[1:]
    known = know_base(config, place, refuses_gpt_oss="the base of a service")
    base = open_backbone(config, known, rendezvous=rendezvous)
    parallel = config.parallel
    if parallel.lora_sharding == "auto":
        # One that keeps co-trained jobs' bits.
        parallel = replace(
            parallel, lora_sharding=exact_shardings(parallel.any_sequence_parallel)[0]
        )
    groups, linears = resolve_lora_sharding(
        replace(config, parallel=parallel), known.spec, base.groups, base.linears, ()
    )
    if config.run.deterministic:
        check_deterministic(groups.device, DTYPES[config.base_model.dtype], linears)
    card = quantisation_card(config.base_model, known.spec, known.quantisation)
    return _Opened(config, known.spec, card, groups, linears, base.engine)


def _make_loop(
    opened: _Opened,
    shape: BankShape,
    events: EventSink,
    watch: RunWatch,
    may_write: Callable[[str], bool],
) -> Loop:
    run = opened.config.run
    super_model = _make_super_model(opened, shape)
    allow_open_files(_MANY_JOBS)
    files = JobFiles(
        run,
        base_model=opened.config.base_model.name,
        quantisation=opened.card,
        has_metrics=opened.groups.is_writer,
        may_write=may_write,
        waits_for_room=watch.waits_for_room,
    )
    loop = Loop(
        super_model,
        opened.spec,
        run,
        files,
        events,
        is_live=True,
        nano_rounds=start_nano_batches(
            run, super_model.engine.nano_batches, opened.groups, (), resuming=False, traces=False
        ),
        watch=watch,
    )
    usual = LoraSpec(rank=_USUAL_RANK, target_modules=_off_experts(shape.targets))
    loop.saver.expect(*[usual] * _SAVED_AT_ONCE)
    return loop


def _kept_ranks(opened: _Opened, targets: frozenset[str]) -> int:
    """Ranks for which the bank keeps memory; see `BankShape.kept_ranks`."""
    groups, spec, budget = opened.groups, opened.spec, _KEPT_BYTES
    if groups.device.type == "cuda":
        budget = _KEPT_SHARE * torch.cuda.mem_get_info(groups.device)[1]
    whole = spec.num_layers * sum(sum(spec.target_shape(t)) for t in _off_experts(targets))
    itemsize = DTYPES[opened.config.base_model.dtype].itemsize
    rank_bytes = whole * itemsize / (groups.layout.tp_size * groups.layout.pp_size)
    return max(1, min(_KEPT_RANKS, int(budget // rank_bytes)))


def _off_experts(targets: frozenset[str]) -> tuple[str, ...]:
    """Targets but those on routed experts, which are too large to keep memory for."""
    return tuple(sorted(targets - {*EXPERT_TARGETS, *FUSED_EXPERT_TARGETS}))


def _make_super_model(opened: _Opened, shape: BankShape) -> SuperModel:
    config, groups = opened.config, opened.groups
    sites, dtype = [site for site, _ in opened.linears], DTYPES[config.base_model.dtype]
    placement = StatePlacement.over_replicas(groups, shards=config.parallel.shard_optimizer)
    bank = AdapterBank(sites, shape, dtype=dtype, device=groups.device, placement=placement)
    attach(opened.linears, bank)
    return SuperModel(
        opened.engine,
        bank,
        groups,
        [],
        micro_batch_tokens=groups.budgets(config.run.micro_batch_tokens)[groups.dp_rank],
        round_shape=RoundShape(exactness=exactness_of(config.run.deterministic)),
        cut_for=partial(rank_aware_cut, opened.spec),
    )


def _check(opened: _Opened, shape: BankShape, prepared: PreparedJob) -> None:
    """Refuses a job that this super-model has no place for."""
    job = prepared.spec
    fit_job(job, opened.config, may_be_driven=True)
    if opened.spec.experts is not None:
        check_job_over_experts(job, opened.config)
    shape.check_holds(job.name, job.lora)
    check_fits_linears(job, opened.spec, opened.groups.layout, opened.linears)
