"""Builds a super-model with random weights and tokens, to measure a machine."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from tlora_megatron.config.job import DataSpec, JobSpec, LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.attach import attach
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import StatePlacement
from tlora_megatron.model.layout import ParallelLayout, Recompute
from tlora_megatron.model.quantisation import BaseQuantisation
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.training.data.job_data import BatchPlan, JobData, TokenSequence
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.nano.rounds import rank_aware_cut
from tlora_megatron.training.round_timing import RoundTiming
from tlora_megatron.training.super_model import SuperModel

_BATCHES = 8
"""Least number of global batches of different sequences in a job's data."""
_SEQUENCES = 512
"""Least number of sequences if lengths differ; fewer would leave the longest out."""


class SyntheticRun:
    """A frozen base model on this process's device; every process of the world must make one.

    Args:
        spec: the shape; weights are drawn.
        layout: of the whole world; another one than the last makes new process groups.
        dtype: of weights and activations.
        recompute: as `run.recompute`.
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
        from tlora_megatron.integrations.megatron.engine import (
            MegatronEngine,
            current_groups,
            pair_linears,
        )

        backbone.initialize_parallel(layout)
        self.spec, self.dtype = spec, dtype
        self.groups = current_groups(layout, with_experts=spec.experts is not None)
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

    def super_model(
        self,
        loads: Sequence[JobLoad],
        micro_batch_tokens: int,
        *,
        timing: RoundTiming | None = None,
        shard_optimizer: bool = False,
    ) -> SuperModel:
        """Puts new jobs on the base model in place of the earlier ones; no jobs: only the base.

        Args:
            timing: shares rounds out by predicted time; None = balances tokens.
            shard_optimizer: as `parallel.shard_optimizer`.
        """
        specs = [_job_spec(load, index) for index, load in enumerate(loads)]
        loras = [spec.lora for spec in specs]
        groups = self.groups
        placement = StatePlacement.over_replicas(groups, shards=shard_optimizer)
        bank = AdapterBank(
            self.sites, loras, dtype=self.dtype, device=groups.device, placement=placement
        )
        attach(self.linears, bank)
        jobs = [self._job(bank, *pair) for pair in zip(specs, loads, strict=True)]
        return SuperModel(
            self.engine,
            bank,
            groups,
            jobs,
            micro_batch_tokens=micro_batch_tokens,
            cut_for=partial(rank_aware_cut, self.spec),
            timing=timing,
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
