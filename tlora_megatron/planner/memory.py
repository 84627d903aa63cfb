"""Bytes that a plan needs on the fullest GPU, term by term.

Checked against the peaks of `scripts/bench/results`: Llama-3.1-8B without recompute on one H200,
8,192 rows, 41.8 GB without adapters and 64.7 GB with eight of ranks 4 to 64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from tlora_megatron.model import ModelSpec
from tlora_megatron.plan import LoraSharding
from tlora_megatron.planner.adapter_sizes import (
    COLUMN_PARALLEL,
    LINEAR_TARGETS,
    adapter_elements,
    chunked,
    copied_elements,
    spread_elements,
)
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.lora_work import PLACES_BYTES, keeps_whole, shares_all
from tlora_megatron.planner.workload import JobLoad

HEAD_ROWS = 1024
"""Rows of logits that exist at a time: `layers.vocabulary_head.ROWS_AT_ONCE`."""
ROW_TILE = 128
"""Rows of a micro-batch on a GPU come in multiples of it: `training.round_rows`."""
FRAGMENTATION = 0.04
"""Of activations and workspace: room that the allocator holds and cannot use. Reserved over
allocated memory was 1.02 to 1.04 in whole rounds on an H200."""
COMMUNICATOR_BYTES = 300e6
"""NCCL's buffers of one process group of several GPUs."""


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
    """The memory of the pipeline stage that needs most; see `MemoryModel.use`."""
    return MemoryModel(spec, jobs, hardware).use(plan, rows, micro_batches)


def most_rows(jobs: Sequence[JobLoad], plan: Plan) -> float:
    """Rows that no micro-batch exceeds, over its CP ranks; the whole budget without jobs."""
    batches = sum(job.batch_size * job.lengths.longest for job in jobs)
    multiple = ROW_TILE * plan.cp_size
    padded = -(-batches // multiple) * multiple
    return float(min(plan.micro_batch_tokens, padded or plan.micro_batch_tokens))


def element_bytes(hardware: HardwareProfile) -> int:
    """Of weights and activations."""
    return 2 if hardware.dtype == "bfloat16" else 4


class MemoryModel:
    """One mix of jobs on one model and kind of machine; plans of it share what they can."""

    def __init__(self, spec: ModelSpec, jobs: Sequence[JobLoad], hardware: HardwareProfile) -> None:
        self.spec = spec
        self.jobs = tuple(jobs)
        self.hardware = hardware
        self._size = element_bytes(hardware)
        self._saved: dict[tuple[int, LoraSharding], SavedInputs] = {}
        self._elements: dict[tuple[int, LoraSharding], tuple[float, float, float, float]] = {}

    def use(
        self, plan: Plan, rows: float | None = None, micro_batches: float | None = None
    ) -> MemoryUse:
        """The memory of the pipeline stage that needs most.

        Args:
            rows: of a micro-batch over its CP ranks; None = the whole budget, or all batches
                together where they do not fill it.
            micro_batches: of a round; None = as many as fill the pipeline.
        """
        rows = most_rows(self.jobs, plan) if rows is None else rows
        in_round = 4.0 * plan.pp_size if micro_batches is None else math.ceil(micro_batches)
        stages = {0, plan.pp_size - 1}
        uses = [self._stage_use(plan, rows / plan.cp_size, in_round, stage) for stage in stages]
        return max(uses, key=lambda use: use.total_bytes)

    def _adapters(self, plan: Plan) -> tuple[float, float, float, float]:
        """Elements a layer: of all slabs, of all compute copies, of the largest slab, and of
        gradients with the zeros between blocks.
        """
        key = plan.tp_size, plan.lora_sharding
        if key not in self._elements:
            spec, jobs = self.spec, self.jobs
            each = [adapter_elements(spec, job, *key) for job in jobs]
            copies = sum(copied_elements(spec, job, *key) for job in jobs)
            spread = sum(spread_elements(spec, job, plan.tp_size) for job in jobs)
            self._elements[key] = sum(each), copies, max(each, default=0.0), spread
        return self._elements[key]

    def _stage_use(self, plan: Plan, local_rows: float, in_round: float, stage: int) -> MemoryUse:
        spec, size = self.spec, self._size
        layers = spec.num_layers // plan.pp_size
        is_first, is_last = stage == 0, stage == plan.pp_size - 1
        adapters, copies, largest, spread = (layers * n for n in self._adapters(plan))
        key = plan.tp_size, plan.lora_sharding
        if key not in self._saved:
            self._saved[key] = _saved_inputs(self.jobs, plan)
        saved = self._saved[key]
        flight = chunks_in_flight(plan, stage, in_round)
        kept = kept_bytes(spec, saved, plan, size)
        places = flight * local_rows * saved.places
        boundary = spec.hidden_size * size / _row_shards(plan) if plan.pp_size > 1 else 0.0
        activations = flight * local_rows * (layers / plan.vpp_size * kept + boundary)
        # A refreshed slab is cast as one buffer, and cleaned in another, while nothing else runs.
        refresh = largest * 2 * size - activations
        workspace = max(local_rows * workspace_bytes(spec, saved, plan, size), refresh)
        head = _head_bytes(spec, plan, local_rows, size) if is_last else 0.0
        groups = sum(n > 1 for n in (plan.tp_size, plan.pp_size, plan.cp_size, plan.dp_size))
        return MemoryUse(
            base_weights=_base_elements(spec, plan, is_first=is_first, is_last=is_last) * size,
            adapter_weights=copies * size,
            adapter_gradients=(adapters + spread) * 4,
            adapter_states=adapters * 12,
            activations=activations + places,
            workspace=workspace,
            logits=max(0.0, head - workspace),
            collectives=groups * COMMUNICATOR_BYTES,
            fragmentation=FRAGMENTATION * (activations + max(workspace, head)),
            reserved=self.hardware.reserved_bytes,
            stage=stage,
        )


def _row_shards(plan: Plan) -> int:
    """Tensor-parallel ranks that share the rows between tensor-parallel regions."""
    return plan.tp_size if plan.sequence_parallel else 1


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


class SavedInputs(NamedTuple):
    """What linears with adapters keep for backward."""

    ranks: dict[str, float]
    """Elements of s a row by linear: rows of the widest rank, and chunks of each row's own; 0 where
    none is adapted."""
    whole: frozenset[str]
    """Linears whose input is kept gathered under sequence parallelism (`lora_work.keeps_whole`)."""
    places: float
    """Bytes a row of the micro-batch, whatever its layers: where s_lora's exchanges find values."""

    def shards(self, linear: str, shard: int) -> int:
        """Ranks that share the rows of a linear's input, of `shard` between linears."""
        return 1 if linear in self.whole else shard


def _saved_inputs(jobs: Sequence[JobLoad], plan: Plan) -> SavedInputs:
    ranks, whole, places = {}, set(), 0.0
    for linear, members in LINEAR_TARGETS.items():
        counts = [sum(target in job.targets for target in members) for job in jobs]
        pairs = list(zip(jobs, counts, strict=True))
        each = [chunked(job.local_rank(plan.tp_size)) * n for job, n in pairs]
        ranks[linear] = max(each, default=0) + sum(each) / max(len(each), 1)
        if linear in COLUMN_PARALLEL and keeps_whole(jobs, linear, plan):
            whole.add(linear)
        values = [shares_all(plan, job) * job.rank * n for job, n in pairs]
        places += PLACES_BYTES * max(values, default=0)
    return SavedInputs(ranks, frozenset(whole), places)


def kept_bytes(
    spec: ModelSpec, saved: SavedInputs, plan: Plan, size: int, *, part: str = "all"
) -> float:
    """Activations that a layer keeps until backward, for one row of the micro-batch.

    Without recompute: the residual stream in front of both norms, rotated queries, keys and values,
    attention's output and log-sums, gate and up; of linears with adapters also the input (attention
    keeps that of `linear_proj` already) and the rank-sized s.

    Args:
        part: `all` of what the plan keeps; `mlp` or `layer`, what these keep when they run again.
    """
    hidden, tp, shard, ranks = spec.hidden_size, plan.tp_size, _row_shards(plan), saved.ranks
    if plan.recompute == "full" and part == "all":
        return hidden * size / shard
    stream = 2 * hidden * size / shard + 8
    attention = (2 * spec.q_size + 2 * spec.kv_size) * size / tp + 4 * spec.num_heads / tp
    attention += (ranks["linear_qkv"] > 0) * hidden * size / saved.shards("linear_qkv", shard)
    attention += (ranks["linear_qkv"] + ranks["linear_proj"]) * size
    mlp = 2 * spec.ffn_size * size / tp
    mlp += (ranks["linear_fc1"] > 0) * hidden * size / saved.shards("linear_fc1", shard)
    mlp += (ranks["linear_fc2"] > 0) * spec.ffn_size * size / tp
    mlp += (ranks["linear_fc1"] + ranks["linear_fc2"]) * size
    if part == "mlp":
        return mlp
    if plan.recompute == "selective" and part == "all":
        mlp = hidden * size / shard  # the checkpoint's input
    return stream + attention + mlp


def workspace_bytes(spec: ModelSpec, saved: SavedInputs, plan: Plan, size: int) -> float:
    """Backward of one layer, for one row: gradients of gate, up and their product, of the
    residual stream (gathered under sequence parallelism), and what the layer recomputes.
    """
    gradients = (3 * spec.ffn_size / plan.tp_size + 3 * spec.hidden_size) * size
    if plan.recompute == "none":
        return gradients
    part = "mlp" if plan.recompute == "selective" else "layer"
    return gradients + kept_bytes(spec, saved, plan, size, part=part)


def _head_bytes(spec: ModelSpec, plan: Plan, local_rows: float, size: int) -> float:
    """Logits of a run of rows, gathered hidden states and the gradients of all rows, twice."""
    columns = -(-spec.vocab_size // plan.tp_size)
    height = min(HEAD_ROWS, local_rows)
    return (height * (columns + spec.hidden_size) + 4 * local_rows * spec.hidden_size) * size
