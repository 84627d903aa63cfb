"""Predicts the time of one round of the super-model under a plan, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import JobSums, adapter_elements
from tlora_megatron.planner.cost.expert_adapters import expert_elements
from tlora_megatron.planner.cost.experts import check_predictable, expert_split
from tlora_megatron.planner.cost.layer_cost import LayerCost, LayerModel
from tlora_megatron.planner.cost.memory import HEAD_ROWS, ROW_TILE
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.step_terms import (
    StepCost,
    fastest_split,
    full_capacity,
    num_parts,
    splits,
)
from tlora_megatron.planner.hardware import CollectiveOp, HardwareProfile
from tlora_megatron.planner.layouts import Span, group_span, plan_spans
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.rounds.model import LOOKED_AT, RoundModel
from tlora_megatron.planner.rounds.packer import timed_load
from tlora_megatron.planner.workload import JobLoad

OPTIMIZER_BYTES = 52
"""Bytes that an optimizer step reads and writes per fp32 element: 4 for the norm, 32 for AdamW with
zeroing of the gradient, 16 to refresh the compute copy."""
_SLICED_BYTES, _GATHERED_BYTES = 38, 8
"""Those of them that sharded states divide, AdamW's and those of the cast; and those that come:
the rest of the gradient is zeroed, and gathered weights are copied."""
_HOST_AGAIN = {"none": 1.0, "selective": 1.15, "full": 1.4}
"""Factor on the host work of a layer with recompute: forward is 0.4 of it, the MLP half of that."""


_but_virtual_stages = attrgetter(*(f.name for f in fields(Plan) if f.name != "vpp_size"))


class _Parts(NamedTuple):
    """Times alike for all virtual stages: seconds per micro-batch, sums and updates per round."""

    layer: LayerCost
    layer_s: float
    head_s: float
    embedding_s: float
    sync_s: float
    optimizer_s: float
    wait: float
    """Time that the mean replica waits, over that of the work that is counted for all of them."""
    busy_share: float


class CostModel:
    """Predicts times for one mix of jobs on one model and machine; plans share computed parts.

    Args:
        rates: those of the machine, shared with other models; None: its own, fitted to `hardware`.
        looked_at: number of sequences to pack for the mean round; fewer are faster, less exact.
    """

    def __init__(
        self,
        spec: ModelSpec,
        jobs: Sequence[JobLoad],
        hardware: HardwareProfile,
        *,
        rates: Rates | None = None,
        looked_at: int = LOOKED_AT,
    ) -> None:
        check_predictable(spec, jobs)
        self.spec = spec
        self.jobs = tuple(jobs)
        self.rates = rates or Rates(hardware)
        self.hardware = hardware
        self._sums = JobSums()
        self.layers = LayerModel(spec, jobs, self.rates, self._sums)
        self._longest = max(jobs, key=lambda job: job.lengths.longest)
        self.rounds = RoundModel(self.jobs, looked_at)
        self._squares_a_row = tuple(job.lengths.squares / job.lengths.mean for job in jobs)
        """Squared rows of sequences for each of a job's rows."""
        self._target_shares = tuple(job.target_share for job in jobs)
        self._job_steps: dict[object, tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self._shared: dict[object, _Parts] = {}

    def round_load(self, plan: Plan, *, spreads: bool = True) -> RoundLoad:
        """The mean load of a round; `spreads` also finds its slowest replica, which is slow."""
        longest = self._longest.lengths.longest
        if longest > plan.micro_batch_tokens:
            raise ValueError(
                f"micro_batch_tokens must be at least {longest}, the longest sequence of job "
                f"{self._longest.name!r}, got {plan.micro_batch_tokens}"
            )
        if plan.num_micro_batches is not None:
            return self.rounds.full_load(plan, full_capacity(plan, longest), spreads=spreads)
        load = self.rounds.load(plan, ROW_TILE * plan.cp_size, spreads=spreads)
        if plan.round_depth == 1 or plan.dp_size == 1 or plan.pp_size > 1:
            return load
        rows = load.rows / plan.cp_size
        ends_s = self._head_s(plan, load, rows) + self._embedding_s(plan, rows)
        curvature = self._curvature(plan, load, self.layers.cost(plan, load), ends_s)
        return timed_load(self.jobs, plan, curvature, ROW_TILE * plan.cp_size)

    def _curvature(self, plan: Plan, load: RoundLoad, layer: LayerCost, ends_s: float) -> float:
        """Time of a squared row of a sequence, over that of a row without attention."""
        layers = self.spec.num_layers / plan.pp_size
        attention_s = layers * layer.attention_s * (1 + layer.attention_again)
        rest_s = layers * layer.total_s + ends_s - attention_s
        squares = self._sums.dot(load.job_tokens, self._squares_a_row)
        dense = attention_s / max(load.filled_share, 1e-9)
        return dense / max(rest_s, 1e-12) / (squares / max(load.tokens, 1e-9))

    def step_cost(self, plan: Plan, load: RoundLoad | None = None) -> StepCost:
        """Predicts the time of one round of a plan that fits into memory.

        Args:
            load: replaces the expected load.

        Raises:
            ValueError: if the plan needs several nodes that the profile does not connect.
        """
        if load is None:
            load = self.round_load(plan)
            key = _but_virtual_stages(plan)
            if key not in self._shared:
                self._shared[key] = self._parts(plan, load)
            parts = self._shared[key]
        else:
            parts = self._parts(plan, load)
        sizes = plan.stages(self.spec)
        hops = self._hops_s(plan, load.rows / plan.cp_size)
        host = self.hardware.host.layer_s * _HOST_AGAIN[plan.recompute] * num_parts(plan, load)
        device = [layers * parts.layer_s + hop for layers, hop in zip(sizes, hops, strict=True)]
        device[0] += parts.embedding_s
        device[-1] += parts.head_s
        works = list(zip(sizes, device, strict=True))
        waited = {
            (layers, own): own
            + sum(share * max(0.0, host * layers - size * own) for share, size in load.sizes)
            for layers, own in set(works)
        }
        stages = [waited[work] for work in works]
        mean, slowest = sum(stages) / len(stages), max(stages)
        count = load.micro_batches
        # Over routed experts it is that of the rounds in which some job steps. Rounds of a dense
        # base were measured one by one, with a wait for each, as Megatron-LM's trainer has it.
        round_s = self.hardware.host.round_s
        if self.spec.experts is not None and plan.num_micro_batches is None:
            round_s *= self._sums.any_of(load.steps)
        return StepCost(
            **parts.layer.times(count * self.spec.num_layers / plan.pp_size),
            head_s=count * (parts.head_s + parts.embedding_s) / plan.pp_size,
            pp_comm_s=count * sum(hops) / len(hops),
            host_s=count * (mean - sum(device) / len(device)),
            imbalance_s=count * (slowest - mean),
            bubble_s=(sum(stages) - slowest) / plan.vpp_size,
            replica_wait_s=count * slowest * parts.wait,
            gradient_sync_s=parts.sync_s,
            optimizer_s=parts.optimizer_s,
            round_s=round_s,
            load=load,
            busy_share=parts.busy_share,
        )

    def most_tokens_per_s(self, plan: Plan) -> float:
        """The speed of a plan whose replicas never wait for each other, however it is split."""
        tried = splits(plan) if self._splits else [plan]
        loads = [(own, self.round_load(own, spreads=False)) for own in tried]
        return max(self.step_cost(own, load).tokens_per_s for own, load in loads)

    @property
    def _splits(self) -> bool:
        """True if nano-batches may pay; over a base with experts there are none."""
        return self.hardware.nano_overlap != 0.0 and self.spec.experts is None

    def _replica_wait(self, load: RoundLoad, curvature: float) -> tuple[float, float]:
        """The mean replica's wait over the time of the work that is counted, and its busy share."""
        spread = load.spread
        if spread is None or load.tokens == 0:
            return 0.0, 1.0
        wait = spread.slowest_rows(curvature) / spread.charged_rows(curvature) - 1
        return max(0.0, wait), spread.busy_share(curvature)

    def fastest_split(self, plan: Plan) -> Plan:
        """The plan with its fastest number of nano-batches: one over a base with experts."""
        if not self._splits:
            return plan
        return fastest_split(plan, lambda tried: self.step_cost(tried).step_time_s)

    def _parts(self, plan: Plan, load: RoundLoad) -> _Parts:
        rows = load.rows / plan.cp_size
        layer, head_s = self.layers.cost(plan, load), self._head_s(plan, load, rows)
        # Only the jobs whose batch a round completes step.
        sync_s, optimizer_s = (
            self._sums.dot(load.steps, times) for times in self._job_steps_s(plan)
        )
        embedding_s = self._embedding_s(plan, rows)
        ends_s = (head_s + embedding_s) / plan.pp_size
        wait = self._replica_wait(load, self._curvature(plan, load, layer, ends_s))
        return _Parts(layer, layer.total_s, head_s, embedding_s, sync_s, optimizer_s, *wait)

    def _head_s(self, plan: Plan, load: RoundLoad, rows: float) -> float:
        """Time of output layer and loss: GEMMs of rows with a target, some rows at a time."""
        spec, size = self.spec, self.rates.element_bytes
        targets = self._sums.dot(load.job_tokens, self._target_shares)
        bins = load.micro_batches * plan.dp_size * plan.cp_size
        height = min(HEAD_ROWS, rows)
        runs = max(1.0, math.ceil(targets / bins / height))
        columns = -(-spec.vocab_size // plan.tp_size)
        gemms = sum(
            self.rates.gemm_s(height, columns, spec.hidden_size, backward=backward)
            for backward in (False, True)
        )
        loss = self.rates.stream_s(3 * height * columns * size)
        hidden_bytes = rows * spec.hidden_size * size
        if plan.sequence_parallel:
            comm = self._over_tp_s(plan, "all_gather", hidden_bytes)
            comm += self._over_tp_s(plan, "reduce_scatter", hidden_bytes)
        else:
            comm = self._over_tp_s(plan, "all_reduce", hidden_bytes)
        return runs * (gemms + loss) + comm

    def _over_tp_s(self, plan: Plan, op: CollectiveOp, size_bytes: float) -> float:
        over = plan_spans(plan, self.hardware.gpus_per_node).tp
        return self.rates.collective_s(op, plan.tp_size, size_bytes, over=over)

    def _embedding_s(self, plan: Plan, rows: float) -> float:
        """Time of the embedding: one look-up, summed over the parts of the vocabulary."""
        moved = rows * self.spec.hidden_size * self.rates.element_bytes
        op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
        return self.rates.stream_s(2 * moved) + self._over_tp_s(plan, op, moved)

    def _hops_s(self, plan: Plan, rows: float) -> list[float]:
        """Time of every stage to exchange hidden states and gradients with its neighbours.

        The ends count their one neighbour twice; with virtual stages they are each other's.
        """
        if plan.pp_size == 1:
            return [0.0]
        size = rows * self.spec.hidden_size * self.rates.element_bytes
        size /= plan.tp_size if plan.sequence_parallel else 1
        crossing = plan_spans(plan, self.hardware.gpus_per_node).hops
        spans = {True: Span(ranks=2, nodes=2), False: None}
        hop_s = {
            far: self.rates.collective_s("p2p", 2, size, over=spans[far]) for far in set(crossing)
        }
        after = [hop_s[far] for far in crossing]
        before = after[-1:] + after[:-1]
        if plan.vpp_size == 1:
            before[0], after[-1] = after[0], before[-1]
        return [plan.vpp_size * (b + a) for b, a in zip(before, after, strict=True)]

    def _job_steps_s(self, plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Each job's times of its gradients' sum and of its update; alike for like adapters."""
        sizes = plan.tp_size, plan.pp_size, plan.cp_size, plan.dp_size
        ends = plan.first_stage_layers, plan.last_stage_layers
        experts = plan.ep_size, plan.expert_tp_size
        key = *sizes, *ends, *experts, plan.lora_sharding, plan.shard_optimizer
        if key not in self._job_steps:
            known: dict[object, tuple[float, float]] = {}
            for job in self.jobs:
                if _adapter(job) not in known:
                    known[_adapter(job)] = self._job_step_s(plan, job)
            sync, update = zip(*(known[_adapter(job)] for job in self.jobs), strict=True)
            self._job_steps[key] = sync, update
        return self._job_steps[key]

    def all_steps_s(self, plan: Plan) -> float:
        """Time of one step of every job."""
        return sum(map(sum, self._job_steps_s(plan)))

    def _job_step_s(self, plan: Plan, job: JobLoad) -> tuple[float, float]:
        layers = max(plan.stages(self.spec))
        replicas = plan.dp_size * plan.cp_size
        over = plan_spans(plan, self.hardware.gpus_per_node).replicas
        sharding = plan.tp_size, plan.lora_sharding
        split = expert_split(self.spec, plan)
        on_experts = expert_elements(self.spec, job, split)
        # Factors that experts share are dense ones, of which each rank that cuts has a part.
        outer = layers * on_experts.shared
        own = layers * adapter_elements(self.spec, job, *sharding) + outer
        shared = layers * adapter_elements(self.spec, job, *sharding, replicated_only=True) + outer
        over_replicas = self.rates.collective_s("all_reduce", replicas, own * 4, over=over)
        over_tp = self._over_tp_s(plan, "all_reduce", shared * 4)
        over_replicas += self._experts_sync_s(plan, layers * on_experts.own)
        over_tp += self._over_tp_s(plan, "all_reduce", layers * on_experts.replicated * 4)
        own += layers * on_experts.own
        moved = own * OPTIMIZER_BYTES
        if plan.shard_optimizer and replicas > 1:
            copies = own * self.rates.element_bytes
            over_replicas += self.rates.collective_s("all_gather", replicas, copies, over=over)
            moved = own * (OPTIMIZER_BYTES - _SLICED_BYTES * (1 - 1 / replicas) + _GATHERED_BYTES)
        moved_s = moved / self.hardware.copy_bytes_per_s
        host_s = self.rates.experts.job_step_s if on_experts.total else 0.0
        return over_replicas + over_tp, moved_s + self.hardware.host.job_step_s + host_s

    def _experts_sync_s(self, plan: Plan, elements: float) -> float:
        """Time to sum gradients over the ranks that hold the same experts."""
        held = plan.ep_size * plan.expert_tp
        replicas = plan.num_gpus // plan.pp_size // held
        over = group_span(replicas, held, plan.num_gpus, self.hardware.gpus_per_node)
        return self.rates.collective_s("all_reduce", replicas, elements * 4, over=over)


def _adapter(job: JobLoad) -> object:
    """What the size of a job's adapter depends on."""
    return job.rank, job.targets, job.num_blocks, job.expert_rank, job.shares_outer
