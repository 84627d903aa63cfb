"""Bytes that a plan needs on the fullest GPU, term by term.

Checked against the peaks of `scripts/bench/results`: Llama-3.1-8B without recompute on one H200,
8,192 rows, 41.8 GB without adapters and 64.7 GB with eight of ranks 4 to 64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tlora_megatron.model import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad

HEAD_ROWS = 1024
"""Rows of logits that exist at a time: `integrations.megatron.head.ROWS_AT_ONCE`."""
RANK_CHUNK = 16
"""Ranks are stored in multiples of it: `ops.tiling.RANK_CHUNK`."""
FRAGMENTATION = 0.04
"""Of activations and workspace: room that the allocator holds and cannot use. Reserved over
allocated memory was 1.02 to 1.04 in whole rounds on an H200."""
COMMUNICATOR_BYTES = 300e6
"""NCCL's buffers of one process group of several GPUs."""

LINEAR_TARGETS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "linear_qkv"),
    "linear_proj": ("o_proj", "linear_proj"),
    "linear_fc1": ("gate_proj", "up_proj", "linear_fc1"),
    "linear_fc2": ("down_proj", "linear_fc2"),
}
"""Targets on each Megatron linear, as in `layers.sites`, which needs torch."""
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the fullest GPU."""

    base_weights: float
    adapter_weights: float
    """Compute copies in the base's dtype."""
    adapter_gradients: float
    """fp32, until the job's step."""
    adapter_states: float
    """fp32 masters and Adam's two moments."""
    activations: float
    """Kept from forward to backward, over the micro-batches in flight."""
    workspace: float
    """Of the layer that runs backward; its recomputed part included."""
    logits: float
    """Of the rows of the head that exist together, beyond the workspace, on the last stage."""
    collectives: float
    fragmentation: float
    reserved: float
    """Driver and libraries."""
    stage: int
    """Pipeline stage of that GPU."""

    @property
    def allocated_bytes(self) -> float:
        """What `torch.cuda.max_memory_allocated` shows."""
        return self.total_bytes - self.collectives - self.fragmentation - self.reserved

    @property
    def total_bytes(self) -> float:
        """All of the GPU's memory that is taken."""
        return sum(getattr(self, name) for name in TERMS)

    @property
    def binding(self) -> str:
        """The largest term."""
        return max(TERMS, key=lambda name: getattr(self, name))


TERMS = tuple(field.name for field in fields(MemoryUse) if field.name != "stage")


def memory_use(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    plan: Plan,
    hardware: HardwareProfile,
    rows: float | None = None,
    micro_batches: float | None = None,
) -> MemoryUse:
    """The memory of the pipeline stage that needs most.

    Args:
        rows: of a micro-batch over its CP ranks; None = the whole budget.
        micro_batches: of a round; None = as many as fill the pipeline.
    """
    rows = float(plan.micro_batch_tokens) if rows is None else rows
    in_round = 4.0 * plan.pp_size if micro_batches is None else math.ceil(micro_batches)
    stages = {0, plan.pp_size - 1}
    uses = [_stage_use(spec, jobs, plan, hardware, rows, in_round, stage) for stage in stages]
    return max(uses, key=lambda use: use.total_bytes)


def element_bytes(hardware: HardwareProfile) -> int:
    """Of weights and activations."""
    return 2 if hardware.dtype == "bfloat16" else 4


def _stage_use(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    plan: Plan,
    hardware: HardwareProfile,
    rows: float,
    in_round: float,
    stage: int,
) -> MemoryUse:
    size = element_bytes(hardware)
    layers = spec.num_layers // plan.pp_size
    is_first, is_last = stage == 0, stage == plan.pp_size - 1
    local_rows = rows / plan.cp_size
    adapters = layers * adapter_elements(spec, tuple((j.rank, j.targets) for j in jobs), plan)
    copies = layers * adapter_elements(
        spec, tuple((_chunked(j.rank), j.targets) for j in jobs), plan
    )
    flight = chunks_in_flight(plan, stage, in_round)
    kept = layers / plan.vpp_size * local_rows * kept_bytes(spec, jobs, plan, size)
    workspace = local_rows * workspace_bytes(spec, jobs, plan, size)
    head = _head_bytes(spec, plan, local_rows, size) if is_last else 0.0
    boundary = local_rows * spec.hidden_size * size / (plan.tp_size if _shards_rows(plan) else 1)
    activations = flight * kept + (flight * boundary if plan.pp_size > 1 else 0.0)
    largest = max((adapter_elements(spec, ((j.rank, j.targets),), plan) for j in jobs), default=0.0)
    # A refreshed slab is cast as one buffer, and cleaned in another, while nothing else runs.
    step = layers * largest * 2 * size
    workspace = max(workspace, step - activations)
    groups = sum(n > 1 for n in (plan.tp_size, plan.pp_size, plan.cp_size, plan.dp_size))
    return MemoryUse(
        base_weights=_base_elements(spec, plan, is_first=is_first, is_last=is_last) * size,
        adapter_weights=copies * size,
        adapter_gradients=adapters * 4,
        adapter_states=adapters * 12,
        activations=activations,
        workspace=workspace,
        logits=max(0.0, head - workspace),
        collectives=groups * COMMUNICATOR_BYTES,
        fragmentation=FRAGMENTATION * (activations + max(workspace, head)),
        reserved=hardware.reserved_bytes,
        stage=stage,
    )


def _chunked(rank: int) -> int:
    return -(-rank // RANK_CHUNK) * RANK_CHUNK


def _shards_rows(plan: Plan) -> bool:
    return plan.sequence_parallel and plan.tp_size > 1


def local_shape(spec: ModelSpec, linear: str, tp_size: int) -> tuple[int, int]:
    """`(out, in)` of a Megatron linear on one tensor-parallel rank."""
    out_size, in_size = spec.target_shape(linear)
    if linear in COLUMN_PARALLEL:
        return out_size // tp_size, in_size
    return out_size, in_size // tp_size


def target_width(spec: ModelSpec, target: str, linear: str, tp_size: int) -> int:
    """Output features of a target on one tensor-parallel rank."""
    out_size = spec.target_shape(target)[0]
    return out_size // tp_size if linear in COLUMN_PARALLEL else out_size


@functools.lru_cache(maxsize=4096)
def _elements_a_rank(
    spec: ModelSpec, targets: tuple[str, ...], tp_size: int, *, replicated_only: bool
) -> int:
    """Elements of both factors of one layer for rank 1, on one tensor-parallel rank."""
    total = 0
    for linear, members in LINEAR_TARGETS.items():
        in_size = local_shape(spec, linear, tp_size)[1]
        for target in members:
            if target not in targets:
                continue
            width = target_width(spec, target, linear, tp_size)
            if not replicated_only:
                total += in_size + width
            elif tp_size > 1:
                total += in_size if linear in COLUMN_PARALLEL else width
    return total


def adapter_elements(
    spec: ModelSpec,
    adapters: Sequence[tuple[int, tuple[str, ...]]],
    plan: Plan,
    *,
    replicated_only: bool = False,
) -> float:
    """Elements of adapters `(rank, targets)` in one layer on one GPU."""
    return float(
        sum(
            rank * _elements_a_rank(spec, targets, plan.tp_size, replicated_only=replicated_only)
            for rank, targets in adapters
        )
    )


def _base_elements(spec: ModelSpec, plan: Plan, *, is_first: bool, is_last: bool) -> float:
    hidden, ffn = spec.hidden_size, spec.ffn_size
    linears = hidden * (2 * spec.q_size + 2 * spec.kv_size) + 3 * hidden * ffn
    norms = 2 * hidden + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = (spec.q_size + 2 * spec.kv_size) / plan.tp_size if spec.qkv_bias else 0
    layers = spec.num_layers // plan.pp_size
    table = -(-spec.vocab_size // plan.tp_size) * hidden
    tables = 1 if is_first and is_last and spec.tied_embeddings else is_first + is_last
    final_norm = hidden if is_last else 0
    return layers * (linears / plan.tp_size + norms + biases) + tables * table + final_norm


def chunks_in_flight(plan: Plan, stage: int, in_round: float) -> float:
    """Micro-batches of one model chunk whose activations a stage holds at its fullest, 1F1B.

    Interleaved: Megatron's warm-up of `2 (pp - stage - 1) + (vpp - 1) pp`, and the one that runs.
    """
    if plan.pp_size == 1:
        return 1.0
    behind = plan.pp_size - stage - 1
    if plan.vpp_size == 1:
        return min(in_round, behind + 1)
    return min(in_round * plan.vpp_size, 2 * behind + (plan.vpp_size - 1) * plan.pp_size + 1)


def kept_bytes(
    spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, size: int, *, part: str = "all"
) -> float:
    """Activations that a layer keeps until backward, for one row of the micro-batch.

    Without recompute: the residual stream in front of both norms, rotated queries, keys and values,
    attention's output and log-sums, gate and up; of linears with adapters also the input (attention
    keeps that of `linear_proj` already) and the rank-sized s.
    """
    hidden, tp = spec.hidden_size, plan.tp_size
    shard = tp if _shards_rows(plan) else 1
    if plan.recompute == "full" and part == "all":
        return hidden * size / shard
    has = {linear: _is_adapted(jobs, linear) for linear in LINEAR_TARGETS}
    ranks = _saved_ranks(jobs)
    stream = 2 * hidden * size / shard + 8
    attention = (2 * spec.q_size + 2 * spec.kv_size) * size / tp + 4 * spec.num_heads / tp
    attention += has["linear_qkv"] * hidden * size / shard
    attention += (ranks["linear_qkv"] + ranks["linear_proj"]) * size
    mlp = 2 * spec.ffn_size * size / tp
    mlp += has["linear_fc1"] * hidden * size / shard + has["linear_fc2"] * spec.ffn_size * size / tp
    mlp += (ranks["linear_fc1"] + ranks["linear_fc2"]) * size
    if part == "mlp":
        return mlp
    if plan.recompute == "selective" and part == "all":
        mlp = hidden * size / shard  # the checkpoint's input
    return stream + attention + mlp


def _is_adapted(jobs: Sequence[JobLoad], linear: str) -> bool:
    return any(target in job.targets for job in jobs for target in LINEAR_TARGETS[linear])


def _saved_ranks(jobs: Sequence[JobLoad]) -> dict[str, float]:
    """Elements of s a row: rows of the widest rank, and chunks of each row's own, by linear."""
    ranks = {}
    for linear, members in LINEAR_TARGETS.items():
        each = [
            _chunked(job.rank) * sum(target in job.targets for target in members) for job in jobs
        ]
        ranks[linear] = max(each, default=0) + sum(each) / max(len(each), 1)
    return ranks


def workspace_bytes(spec: ModelSpec, jobs: Sequence[JobLoad], plan: Plan, size: int) -> float:
    """Backward of one layer, for one row: gradients of gate, up and their product, of the
    residual stream (gathered under sequence parallelism), and what the layer recomputes.
    """
    gradients = (3 * spec.ffn_size / plan.tp_size + 3 * spec.hidden_size) * size
    if plan.recompute == "none":
        return gradients
    part = "mlp" if plan.recompute == "selective" else "layer"
    return gradients + kept_bytes(spec, jobs, plan, size, part=part)


def _head_bytes(spec: ModelSpec, plan: Plan, local_rows: float, size: int) -> float:
    """Logits of a run of rows, gathered hidden states and the gradients of all rows, twice."""
    columns = -(-spec.vocab_size // plan.tp_size)
    height = min(HEAD_ROWS, local_rows)
    return (height * (columns + spec.hidden_size) + 4 * local_rows * spec.hidden_size) * size
