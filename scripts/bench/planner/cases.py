"""Cases for the planner: models, layouts and jobs, and what the planner predicts for them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from scripts.bench.harness.arguments import REPO
from scripts.bench.step.jobs import ATTENTION, MIXES, RANKS
from tlora_megatron.config.schema import EMBEDDING, HEAD, Recompute
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.quantisation import BaseQuantisation, quantised_on_reading
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan, misfit
from tlora_megatron.planner.cost.cost_model import CostModel
from tlora_megatron.planner.cost.memory import ROW_TILE, MemoryModel, MemoryUse
from tlora_megatron.planner.cost.step_terms import StepCost
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import data_lengths
from tlora_megatron.training.data.job_data import BatchPlan
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, batch_items, round_up
from tlora_megatron.training.packing.portions import fill_bins

LLAMA_8B = REPO / "configs" / "models" / "llama-3.1-8b.json"
BATCHES = MIXES["batch 1-8"]
"""Sequences a step of each job, on one GPU; on more, as many times that."""
LENGTHS = (256, 265, 272, 284, 296, 313, 338, 376, 517, 837, 1171, 1686, 2018)
SHARES = (0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.075, 0.045, 0.025, 0.005)
"""Shares of sequences with these lengths, in five data sets: see `step.jobs`."""
CASES = {
    1: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp1 pp1 selective 8j 8192t",
        "8b/32 tp1 pp1 full 4j 8192t",
        "8b/32 tp1 pp1 none 2j 4096t",
        "8b/16 tp1 pp1 none 16j 16384t",
        "70b/8 tp1 pp1 none 4j 8192t",
        "8b-fp8/32 tp1 pp1 none 8j 8192t",
        "70b/8 tp1 pp1 full 8j 8192t",
    ),
    2: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp2 pp1 none 8j 8192t",
        "8b/32 tp1 pp2 none 8j 8192t",
        "8b/32 tp2 pp1 selective 16j 8192t",
        "70b/16 tp2 pp1 none 8j 8192t",
        "70b/16 tp1 pp2 selective 4j 4096t",
        "8b/32 tp1 pp1 none 2j 4096t",
        "8b/32 tp1 pp1 cp2 none 8j 16384t",
    ),
    4: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp2 pp1 none 8j 8192t",
        "8b/32 tp4 pp1 none 8j 8192t",
        "8b/32 tp1 pp2 none 8j 8192t",
        "8b/32 tp1 pp4 none 8j 8192t",
        "8b/32 tp2 pp2 none 8j 8192t",
        "70b/16 tp4 pp1 none 8j 8192t",
        "70b/16 tp1 pp4 none 8j 4096t",
        "70b/16 tp2 pp2 selective 16j 8192t",
        "70b/16 tp2 pp1 full 4j 8192t",
        "8b/32 tp1 pp1 none 2j 4096t",
        "8b/32 tp1 pp1 cp4 none 8j 32768t",
        "8b/32 tp1 pp1 cp2 none 8j 16384t",
        "8b/32 tp1 pp2 cp2 none 8j 16384t",
        "70b/16 tp2 pp1 cp2 none 8j 16384t",
    ),
    8: (
        "8b/32 tp1 pp1 none 16j 8192t",
        "8b/32 tp2 pp1 none 16j 8192t",
        "8b/32 tp8 pp1 none 16j 8192t",
        "8b/32 tp1 pp4 none 16j 8192t",
        "70b/32 tp8 pp1 none 8j 8192t",
        "70b/32 tp2 pp4 none 8j 4096t",
        "70b/32 tp1 pp8 none 8j 4096t",
        "70b/32 tp4 pp2 selective 16j 8192t",
        "8b/32 tp1 pp1 cp8 none 16j 65536t",
        "70b/32 tp2 pp2 cp2 none 8j 8192t",
    ),
}
"""By number of GPUs of one node."""
NODES_CASES = {
    2: ("8b/16 tp1 pp1 none 8j 8192t", "8b/16 tp1 pp2 none 8j 8192t"),
    4: (
        "8b/32 tp1 pp1 none 8j 8192t",
        "8b/32 tp2 pp1 none 8j 8192t",
        "8b/32 tp1 pp2 none 8j 8192t",
        "8b/32 tp2 pp2 none 8j 8192t",
    ),
    8: ("8b/32 tp1 pp1 none 16j 8192t", "8b/32 tp4 pp1 none 16j 8192t"),
}
"""By number of GPUs of several nodes."""
MEGATRON_CASES = {
    1: ("8b/32 tp1 pp1 none 8j 8192t m1",),
    2: (
        "8b/32 tp1 pp2x4 none 8j 4096t m4",
        "8b/32 tp1 pp2 none 8j 4096t m4",
        "8b/32 tp2 pp1 none 8j 8192t m1",
        "70b/16 tp1 pp2x4 selective 8j 2048t m4",
    ),
    4: (
        "8b/32 tp1 pp4x4 none 8j 4096t m8",
        "8b/32 tp1 pp4x2 none 8j 4096t m4",
        "8b/32 tp1 pp4 none 8j 4096t m8",
        "8b/32 tp1 pp2x4 none 8j 4096t m4",
        "8b/32 tp1 pp2x4 cp2 none 8j 8192t m4",
        "70b/32 tp1 pp4x4 none 8j 2048t m8",
        "70b/32 tp2 pp2x8 none 8j 4096t m4",
    ),
    8: (
        "70b/80 tp1 pp2x20 cp2 none 8j 4096t m4",
        "70b/80 tp2 pp1 cp2 none 8j 4096t m1",
        "70b/80 tp1 pp8x5 none 8j 2048t m16",
        "70b/80 tp2 pp4x5 none 8j 4096t m8",
    ),
}
"""By number of GPUs, under Megatron-LM's trainer."""
_CASE = re.compile(
    r"(?P<model>(?:8b|70b|tiny)(?P<fp8>-fp8)?)/(?P<layers>\d+) tp(?P<tp>\d+) "
    r"pp(?P<pp>\d+)(x(?P<vpp>\d+))?( cp(?P<cp>\d+))? (?P<recompute>none|selective|full) "
    r"(?P<jobs>\d+)j (?P<tokens>\d+)t( m(?P<batches>\d+))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    model: str
    spec: ModelSpec
    quantisation: BaseQuantisation | None
    plan: Plan
    jobs: tuple[JobLoad, ...]


def parse_case(text: str, world_size: int) -> Case:
    """Reads a case for a world.

    Raises:
        ValueError: if it is malformed, or its sizes do not divide the world or the model.
    """
    match = _CASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a case must look like {CASES[1][0]!r}, got {text!r}")
    tp, pp, cp = int(match["tp"]), int(match["pp"]), int(match["cp"] or 1)
    if world_size % (tp * pp * cp):
        raise ValueError(f"tp * pp * cp must divide the world of {world_size}, got {text!r}")
    plan = Plan(
        tp_size=tp, pp_size=pp, vpp_size=int(match["vpp"] or 1), cp_size=cp,
        dp_size=world_size // (tp * pp * cp), sequence_parallel=tp > 1,
        micro_batch_tokens=int(match["tokens"]), recompute=cast(Recompute, match["recompute"]),
        num_micro_batches=int(match["batches"]) if match["batches"] else None,
    )  # fmt: skip
    spec = model_spec(match["model"].removesuffix("-fp8"))
    spec = replace(spec, num_layers=int(match["layers"]))
    reason = misfit(spec, plan)
    if reason is not None or (plan.vpp_size > 1 and plan.num_micro_batches is None):
        raise ValueError(f"a case must fit its model, got {text!r}: {reason or 'xN wants mN'}")
    quantisation = quantised_on_reading(spec, (EMBEDDING, HEAD)) if match["fp8"] else None
    if quantisation is not None:
        spec = replace(spec, fp8_linears=quantisation.layers_by_linear)
    longest = min(LENGTHS[-1], plan.micro_batch_tokens // cp // 4)
    jobs = make_jobs(int(match["jobs"]), world_size, longest)
    return Case(
        name=text.strip(), model=match["model"], spec=spec, quantisation=quantisation, plan=plan,
        jobs=jobs,
    )  # fmt: skip


def model_spec(name: str) -> ModelSpec:
    """Llama-3.1's shapes by size, or one for a CPU."""
    base = read_model_spec(LLAMA_8B)
    sizes = {
        "8b": {},
        "70b": {"hidden_size": 8192, "num_heads": 64, "ffn_size": 28672},
        "tiny": {
            "hidden_size": 64,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 8,
            "ffn_size": 96,
            "vocab_size": 512,
        },
    }
    return replace(base, **cast(Any, sizes[name]))


def make_jobs(count: int, world_size: int, longest: int) -> tuple[JobLoad, ...]:
    """Heterogeneous jobs: ranks 4 to 64, every third on attention only, batches of 1 to 8 a GPU."""
    lengths = LengthHistogram.from_counts(zip(LENGTHS, SHARES, strict=True)).clipped(longest)
    jobs = []
    for i in range(count):
        job = JobLoad(
            name=f"job{i}",
            rank=RANKS[i % len(RANKS)],
            batch_size=BATCHES[i % len(BATCHES)] * world_size,
            lengths=lengths,
        )
        jobs.append(replace(job, targets=ATTENTION) if i % 3 == 2 else job)
    return tuple(jobs)


def predict(case: Case, hardware: HardwareProfile) -> tuple[StepCost, MemoryUse]:
    cost = CostModel(case.spec, case.jobs, hardware).step_cost(case.plan)
    return cost, MemoryModel(case.spec, case.jobs, hardware).use(case.plan)


class PackedRound(NamedTuple):
    tokens: int
    """Rows of all jobs over all ranks."""
    padded: int
    """Micro-batches of a rank times their rows: what the slowest rank computes."""


def packed_rounds(case: Case, count: int) -> list[PackedRound]:
    """The first rounds of a case: its jobs' data in their order, by the run's own packer."""
    plan = case.plan
    streams = [_Batches(load, seed) for seed, load in enumerate(case.jobs)]
    queues: list[list[Item]] = [[] for _ in streams]
    rounds = []
    for index in range(count):
        queues = [queue or stream.next() for queue, stream in zip(queues, streams, strict=True)]
        filled, queues = fill_bins(
            queues, capacity=plan.micro_batch_tokens, dp_size=plan.dp_size, pp_size=plan.pp_size,
            first_slot=index, num_micro_batches=plan.num_micro_batches,
        )  # fmt: skip
        loads = [sum(placed.item.length for placed in content) for content in filled.micro_batches]
        is_full = plan.num_micro_batches is not None
        rows = plan.micro_batch_tokens if is_full else round_up(max(loads), ROW_TILE * plan.cp_size)
        rounds.append(PackedRound(sum(loads), len(filled.replicas[0]) * rows))
    return rounds


class _Batches:
    """A job's global batches one after another, as `SyntheticRun` has them."""

    def __init__(self, load: JobLoad, seed: int) -> None:
        rows = ((np.int32(0), np.True_, length + 1) for length in data_lengths(load))
        both = (
            (np.broadcast_to(token, n), np.broadcast_to(target, n)) for token, target, n in rows
        )
        self._sequences = [TokenSequence(*arrays) for arrays in both]
        self._plan = BatchPlan(len(self._sequences), load.batch_size, seed, max_steps=10**6)
        self._step = 0

    def next(self) -> list[Item]:
        self._step += 1
        return batch_items([self._sequences[i] for i in self._plan.indices(self._step - 1)])


def typical_window(rounds: Sequence[PackedRound], size: int, first: int) -> int:
    """Where the `size` rounds in a row begin that are most like the mean of all.

    A few rounds from anywhere hold up to 15 % more or less, where batches wait for room.

    Args:
        first: the earliest round that may be one of them.
    """
    tokens, padded = (statistics.fmean(values) for values in zip(*rounds, strict=True))

    def distance(begin: int) -> float:
        window = rounds[begin : begin + size]
        own = [statistics.fmean(values) for values in zip(*window, strict=True)]
        return abs(own[0] / tokens - 1) + abs(own[1] / padded - 1)

    return min(range(first, len(rounds) - size + 1), key=distance)
