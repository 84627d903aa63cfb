"""Counts a layer's saved activations and workspace in bytes per row of the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import (
    ALL_LINEARS,
    COLUMN_PARALLEL,
    PLACES_BYTES,
    chunked,
    keeps_whole,
    local_shape,
    shares_all,
)
from tlora_megatron.planner.cost.expert_adapters import KeptInputs, kept_inputs, routed_bytes
from tlora_megatron.planner.cost.experts import expert_split, shared_bytes
from tlora_megatron.planner.workload import JobLoad


def row_shards(plan: Plan) -> int:
    """Number of tensor-parallel ranks that share the rows between tensor-parallel regions."""
    return plan.tp_size if plan.sequence_parallel else 1


class SavedInputs(NamedTuple):
    """Tensors that linears with adapters keep for backward."""

    ranks: dict[str, float]
    """Elements of s per row, by linear: columns of the widest rank, and of each row's own in whole
    chunks; 0 without adapters."""
    whole: frozenset[str]
    """Linears whose input is kept gathered under sequence parallelism (`lora_work.keeps_whole`)."""
    places: float
    """Bytes per row of the micro-batch for all layers together: positions for s_lora."""
    experts: KeptInputs = KeptInputs()
    """What adapters on routed experts need."""

    def shards(self, linear: str, shard: int) -> int:
        """Number of ranks that share the rows of a linear's input; `shard`: between linears."""
        return 1 if linear in self.whole else shard


def saved_inputs(spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan) -> SavedInputs:
    """Returns what the adapters of a mix keep in a layer."""
    ranks, whole, places = {}, set(), 0.0
    for linear, members in ALL_LINEARS.items():
        counts = [sum(target in job.targets for target in members) for job in jobs]
        pairs = list(zip(jobs, counts, strict=True))
        each = [chunked(job.local_rank(plan.tp_size)) * n for job, n in pairs]
        ranks[linear] = max(each, default=0) + sum(each) / max(len(each), 1)
        if linear in COLUMN_PARALLEL and keeps_whole(jobs, linear, plan):
            whole.add(linear)
        values = [shares_all(plan, job) * job.rank * n for job, n in pairs]
        places += PLACES_BYTES * max(values, default=0)
    split = expert_split(spec, plan)
    experts = KeptInputs() if split is None else kept_inputs(spec, jobs, split)
    return SavedInputs(ranks, frozenset(whole), places, experts)


def kept_bytes(
    spec: ModelSpec, saved: SavedInputs, plan: Plan, size: int, *, part: str = "all"
) -> float:
    """Bytes of activations that a layer keeps until backward, per row of the micro-batch.

    Without recompute: the residual stream in front of both norms, rotated queries, keys and values,
    attention's output and log-sums, gate and up, and if heads are normed the projection; of linears
    with adapters also the input (attention keeps that of `linear_proj` already) and the rank-sized
    s.

    Args:
        part: `all` of what the plan keeps; `mlp` or `layer`, what these keep when they run again.
    """
    hidden, tp, shard, ranks = spec.hidden_size, plan.tp_size, row_shards(plan), saved.ranks
    if plan.recompute == "full" and part == "all":
        return hidden * size / shard
    stream = 2 * hidden * size / shard + 8
    attention = (2 * spec.q_size + 2 * spec.kv_size) * size / tp + 4 * spec.num_heads / tp
    if spec.qk_norm:
        attention += (spec.q_size + 2 * spec.kv_size) * size / tp
    attention += (ranks["linear_qkv"] > 0) * hidden * size / saved.shards("linear_qkv", shard)
    attention += (ranks["linear_qkv"] + ranks["linear_proj"]) * size
    mlp = _mlp_bytes(spec, saved, plan, size, part)
    if part == "mlp":
        return mlp
    if plan.recompute == "selective" and part == "all":
        mlp = hidden * size / shard  # the checkpoint's input
    return stream + attention + mlp


def _mlp_bytes(spec: ModelSpec, saved: SavedInputs, plan: Plan, size: int, part: str) -> float:
    """Bytes that an MLP keeps, or routed experts.

    What experts keep for rows that came to them is left out of `all`: its sum over layers is known
    better than one layer's.
    """
    split = expert_split(spec, plan)
    if split is not None:
        of_experts = routed_bytes(split, size, saved.experts)
        again = 0.0 if part == "all" else split.fullest() * of_experts.kept_routed
        keeps_input = not _keeps_same_rows(saved.experts, plan)
        shared = shared_bytes(spec, saved.ranks, plan, size, keeps_input=keeps_input)
        return of_experts.kept + again + shared.kept
    hidden, tp, shard, ranks = spec.hidden_size, plan.tp_size, row_shards(plan), saved.ranks
    mlp = 2 * spec.ffn_size * size / tp
    mlp += (ranks["linear_fc1"] > 0) * hidden * size / saved.shards("linear_fc1", shard)
    mlp += (ranks["linear_fc2"] > 0) * spec.ffn_size * size / tp
    mlp += (ranks["linear_fc1"] + ranks["linear_fc2"]) * size
    return mlp


def _keeps_same_rows(routed: KeptInputs, plan: Plan) -> bool:
    """True if adapters on routed experts keep the rows of a shared expert, too."""
    keeps = routed.first_summed > 0 or (routed.reads_routed and plan.ep_size == 1)
    return keeps and not (plan.sequence_parallel and plan.expert_tp == plan.tp_size)


def workspace_bytes(spec: ModelSpec, saved: SavedInputs, plan: Plan, size: int) -> float:
    """Workspace in bytes of one layer's backward, per row.

    It holds the gradients of gate, up and their product, or what experts work in, the gradient of
    the residual stream (gathered under sequence parallelism), and what the layer recomputes.
    """
    split = expert_split(spec, plan)
    if split is None:
        gradients = (3 * spec.ffn_size / plan.tp_size + 3 * spec.hidden_size) * size
    else:
        routed = routed_bytes(split, size, saved.experts)
        # A shared expert's backward comes behind theirs, when what they kept is gone.
        shared = shared_bytes(spec, saved.ranks, plan, size, keeps_input=False).workspace
        beside = shared - routed.kept - routed.kept_routed
        if _keeps_same_rows(saved.experts, plan) and saved.ranks["shared_fc1"]:
            beside += spec.hidden_size * size
        gradients = max(routed.workspace, beside) + 3 * spec.hidden_size * size
    shapes = [local_shape(spec, linear, plan.tp_size) for linear, _ in spec.fp8_linears]
    gradients += max((columns for columns, _ in shapes), default=0)  # FP8 codes of dy
    if plan.recompute == "none":
        return gradients
    part = "mlp" if plan.recompute == "selective" else "layer"
    return gradients + kept_bytes(spec, saved, plan, size, part=part)
