"""Builds a super-model with random weights and tokens, and times its layers and rounds."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.config.schema import Recompute
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import StatePlacement
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.layer_cost import LayerCost, LayerModel
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.hardware import HardwareProfile, HostCost
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.sizes import ProfileSizes
from tlora_megatron.profiling.timer import DeviceTimer
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.nano.rounds import rank_aware_cut
from tlora_megatron.training.super_model import SuperModel

_BATCHES = 8
"""Least number of global batches of different sequences in a job's data."""
_SEQUENCES = 512
"""Least number of sequences if lengths differ; fewer would leave the longest out."""


class SyntheticRun:
    """A frozen base model on this process's device; every process of the world must make one.

    Args:
        layout: of the whole world; another one than the last makes new process groups.
        quantisation: of the drawn weights; None = they stay in `dtype`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ParallelLayout,
        *,
        dtype: torch.dtype,
        recompute: Recompute = "none",
        quantisation: BaseQuantisation | None = None,
    ) -> None:
        from tlora_megatron.integrations.megatron import engine as routing
        from tlora_megatron.integrations.megatron import model as backbone
        from tlora_megatron.integrations.megatron import process_groups
        from tlora_megatron.integrations.megatron.engine import MegatronEngine, pair_linears

        process_groups.initialize_parallel(layout)
        self.spec, self.dtype = spec, dtype
        self.groups = process_groups.current_groups(layout, with_experts=spec.experts is not None)
        model = backbone.build_backbone(
            spec, layout, dtype=dtype, recompute=recompute, quantisation=quantisation
        )
        backbone.load_backbone(model, spec, None, layout)
        routing.install()
        tp_rank, pp_rank = self.groups.tp_rank, self.groups.pp_rank
        place = self.groups.expert_place
        self.sites = stage_sites(spec, layout, tp_rank=tp_rank, pp_rank=pp_rank, place=place)
        self.linears = pair_linears(model, self.sites)
        self.engine = MegatronEngine(model, self.groups, spec.vocab_size)
        self.timer = DeviceTimer(self.groups.device)

    def super_model(
        self,
        loads: Sequence[JobLoad],
        micro_batch_tokens: int,
        *,
        shard_optimizer: bool = False,
    ) -> SuperModel:
        """Puts new jobs on the base model in place of the earlier ones; no jobs: only the base."""
        specs = [_job_spec(load, index) for index, load in enumerate(loads)]
        loras = [spec.lora for spec in specs]
        groups = self.groups
        placement = StatePlacement.over_replicas(groups, shards=shard_optimizer)
        bank = AdapterBank(
            self.sites, loras, dtype=self.dtype, device=groups.device, placement=placement
        )
        attach(self.linears, bank)
        jobs = [self._job(bank, *pair) for pair in zip(specs, loads, strict=True)]
        cut_for = partial(rank_aware_cut, self.spec)
        return SuperModel(
            self.engine, bank, groups, jobs, micro_batch_tokens=micro_batch_tokens, cut_for=cut_for
        )

    def _job(self, bank: AdapterBank, spec: JobSpec, load: JobLoad) -> JobState:
        slab = bank.new_slab(spec.lora)
        # Not as a run draws it, factor by factor on the CPU: of a 70B adapter that takes seconds.
        whole = torch.empty(slab.layout.numel, device=bank.device)
        slab.put("master", whole.normal_(0.0, self.spec.hidden_size**-0.5))
        train = tuple(_sequences(load, self.spec.vocab_size, spec.seed))
        return JobState(
            spec=spec,
            data=JobData(train=train, eval=(), num_truncated=0, num_dropped=0),
            plan=BatchPlan.for_job(spec, len(train)),
            adapter=Adapter(name=spec.name, lora=spec.lora, slab=slab),
        )

    def close(self) -> None:
        """Frees the memory; the process groups stay for the next run."""
        del self.engine, self.linears
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _job_spec(load: JobLoad, index: int) -> JobSpec:
    return JobSpec(
        name=load.name,
        data=DataSpec(train="synthetic"),
        lora=LoraSpec(
            rank=load.rank,
            dropout=load.dropout,
            target_modules=load.targets,
            parametrization="block_diagonal" if load.num_blocks > 1 else "standard",
            num_blocks=load.num_blocks,
        ),
        batch_size=load.batch_size,
        max_seq_len=load.lengths.longest + 1,
        max_steps=10**6,
        seed=index,
    )


def data_lengths(load: JobLoad) -> list[int]:
    """Rows of each sequence of a job's data, before any shuffling."""
    least = 1 if len(load.lengths.pairs) == 1 else _SEQUENCES
    count = max(_BATCHES * load.batch_size, least)
    return list(itertools.islice(load.lengths.spread(), count))


def _sequences(load: JobLoad, vocab_size: int, seed: int) -> list[TokenSequence]:
    """Random tokens in the job's lengths; the last `target_share` of each are targets."""
    draw = np.random.default_rng(seed)
    sequences = []
    for length in data_lengths(load):
        is_target = np.arange(length + 1) > length * (1 - load.target_share)
        is_target[0], is_target[-1] = False, True
        tokens = draw.integers(0, vocab_size, length + 1, dtype=np.int32)
        sequences.append(TokenSequence(tokens, is_target))
    return sequences


_FEW, _MANY = 1, 4
"""Numbers of layers of the two models whose time difference is taken."""
_TURNS = 20
_TP_SIZES = (2, 4, 8)
_PLAUSIBLE_STRETCH = (0.8, 3.0)
_JOBS = 4
_RANKS = (8, 16, 32, 64)
_PLAUSIBLE = (0.2, 1.0)
"""Plausible rates of a layer's elementwise passes, as shares of a copy's bandwidth. A rate outside
means that the other parts were measured badly."""


def measure_layers(
    profile: HardwareProfile, sizes: ProfileSizes, dtype: torch.dtype
) -> HardwareProfile:
    """Adds host cost, and the rate of elementwise passes from the rest of a layer's time."""
    few, many = (_measure(sizes, layers, dtype) for layers in (_FEW, _MANY))
    full_s, step_s = ((many[i] - few[i]) / (_MANY - _FEW) for i in (0, 1))  # of a layer
    *_, one_s, all_s = few
    job_step_s = max(0.0, (all_s - one_s) / (_JOBS - 1))
    host = HostCost(
        layer_s=max(0.0, step_s), round_s=max(0.0, one_s - job_step_s), job_step_s=job_step_s
    )
    stream = _stream_bytes_per_s(profile, sizes, full_s)
    return replace(profile, stream_bytes_per_s=stream, host=host)


def measure_stretch(profile: HardwareProfile, sizes: ProfileSizes, dtype: torch.dtype) -> float:
    """Measures how much longer tensor-parallel collectives take between a layer's kernels.

    Takes whole layers under each TP size of this world, with sequence parallelism: their time
    beyond compute, over the time of the collectives back to back. Returns 1 with one process.
    """
    world_size, found = dist.get_world_size(), []
    for tp_size in (n for n in _TP_SIZES if world_size % n == 0 and n <= world_size):
        if sizes.layer_spec.num_kv_heads % tp_size:
            continue
        layout = ParallelLayout(
            tp_size=tp_size, dp_size=world_size // tp_size, sequence_parallel=True
        )
        times = []
        for layers in (_FEW, _MANY):
            spec = replace(sizes.layer_spec, num_layers=layers)
            with closing(SyntheticRun(spec, layout, dtype=dtype)) as run:
                times.append(_sustained_s(run, sizes.layer_tokens))
        plan = Plan(tp_size=tp_size, sequence_parallel=True)
        cost = _layer_cost(profile, sizes, plan)
        beyond = (times[1] - times[0]) / (_MANY - _FEW) - (cost.total_s - cost.tp_comm_s)
        found.append(beyond / cost.tp_comm_s)
    low, high = _PLAUSIBLE_STRETCH
    return min(high, max(low, statistics.fmean(found))) if found else 1.0


def _loads(tokens: int, count: int, world_size: int) -> list[JobLoad]:
    """Jobs whose batches together fill a micro-batch of `tokens` rows on every rank."""
    length = max(2, min(512, tokens // count))
    batch = max(1, tokens * world_size // count // length)
    return [
        JobLoad(
            name=f"job{i}",
            rank=_RANKS[i % len(_RANKS)],
            batch_size=batch,
            lengths=LengthHistogram.single(length),
        )
        for i in range(count)
    ]


def _measure(
    sizes: ProfileSizes, layers: int, dtype: torch.dtype
) -> tuple[float, float, float, float]:
    """Seconds forward and backward of full and of small micro-batches, and of the rest of a round.

    The rest with one job comes before that with all of them.
    """
    spec = replace(sizes.layer_spec, num_layers=layers)
    layout = ParallelLayout(dp_size=dist.get_world_size())
    with closing(SyntheticRun(spec, layout, dtype=dtype)) as run:
        full_s = _sustained_s(run, sizes.layer_tokens)
        few_s, all_s = _step_s(run, sizes.few_tokens, _JOBS)
        _, one_s = _step_s(run, sizes.few_tokens, 1)
    return full_s, few_s, one_s, all_s


def _sustained_s(run: SyntheticRun, tokens: int) -> float:
    """Forward and backward of full micro-batches, one after another."""
    model = run.super_model(_loads(tokens, _JOBS, run.groups.layout.dp_size), tokens)
    batches = model.begin_round()
    return run.timer.sustained_s(lambda: model.engine.forward_backward(batches), _TURNS)


def _step_s(run: SyntheticRun, tokens: int, jobs: int) -> tuple[float, float]:
    """Times a round from a standstill: its forward and backward, and the rest."""
    model = run.super_model(_loads(tokens, jobs, run.groups.layout.dp_size), tokens)
    batches = model.begin_round()
    forward_s = run.timer.host_s(lambda: model.engine.forward_backward(batches))
    model.end_round(model.engine.forward_backward(batches))
    return forward_s, max(0.0, run.timer.host_s(model.train_round) - forward_s)


def _layer_cost(profile: HardwareProfile, sizes: ProfileSizes, plan: Plan) -> LayerCost:
    """The planner's cost of a layer at `layer_tokens`."""
    loads = _loads(sizes.layer_tokens, _JOBS, 1)
    tokens = tuple(job.batch_tokens for job in loads)
    load = RoundLoad(
        micro_batches=1,
        rows=sum(tokens),
        job_tokens=tokens,
        job_sequences=tuple(float(job.batch_size) for job in loads),
        steps=(1.0,) * len(loads),
    )
    return LayerModel(sizes.layer_spec, loads, Rates(profile)).cost(plan, load)


def _stream_bytes_per_s(profile: HardwareProfile, sizes: ProfileSizes, layer_s: float) -> float:
    """The rate of elementwise passes that explains the rest of a layer's time."""
    cost = _layer_cost(replace(profile, stream_bytes_per_s=1.0), sizes, Plan())
    left_s = layer_s - (cost.total_s - cost.elementwise_s)
    low, high = (share * profile.copy_bytes_per_s for share in _PLAUSIBLE)
    return min(high, max(low, cost.elementwise_s / left_s)) if left_s > 0 else high
