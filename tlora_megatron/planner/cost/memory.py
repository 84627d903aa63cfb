"""Predicts the bytes that a plan needs on the fullest GPU, term by term.

Checked against measured peaks of Llama-3.1-8B without recompute on one H200 at 8,192 rows: 41.8 GB
without adapters, and 64.7 GB with eight adapters of ranks 4 to 64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

from tlora_megatron.model.quantisation import BLOCK
from tlora_megatron.model.spec import ALL_LINEARS, COLUMN_PARALLEL, ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import (
    PLACES_BYTES,
    adapter_elements,
    chunked,
    copied_elements,
    dense_linears,
    keeps_whole,
    local_shape,
    shares_all,
    spread_elements,
)
from tlora_megatron.planner.cost.expert_adapters import (
    KeptInputs,
    copied_expert_elements,
    expert_elements,
    kept_inputs,
    routed_bytes,
)
from tlora_megatron.planner.cost.experts import check_predictable, expert_split, shared_bytes
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad

HEAD_ROWS = 1024
"""Rows of logits that exist at a time, `layers.vocabulary_head.ROWS_AT_ONCE`."""
ROW_TILE = 128
"""A GPU's rows of a micro-batch are a multiple of this number (`training.packing.round_packer`)."""
FRAGMENTATION = 0.04
"""Share of activations and workspace that the allocator holds and cannot use. The ratio of reserved
to allocated memory was 1.02 to 1.04 in whole rounds on an H200."""
SCALE_BYTES = 4
"""An FP8 weight has an fp32 scale for each output column; blocks of 128 x 128 have fewer."""
COMMUNICATOR_BYTES = 300e6
"""Size of NCCL's buffers for one process group of several GPUs."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on the fullest GPU by term."""

    base_weights: float
    adapter_weights: float
    """Adapters' compute copies in the base's dtype."""
    adapter_gradients: float
    """Adapters' gradients in fp32, kept until the job's step."""
    adapter_states: float
    """Adapters' fp32 masters and Adam's two moments, or this GPU's slice of them."""
    activations: float
    """Activations kept from forward to backward, over the micro-batches in flight."""
    workspace: float
    """Workspace of the layer that runs backward, with its recomputed part."""
    logits: float
    """Logits that exist at a time on the last stage, as far as they exceed the workspace."""
    collectives: float
    """NCCL's buffers, and what is gathered of an adapter that is saved."""
    fragmentation: float
    reserved: float
    """Memory of driver and libraries."""
    stage: int
    """Pipeline stage of the fullest GPU."""

    @property
    def allocated_bytes(self) -> float:
        """The part that `torch.cuda.max_memory_allocated` shows."""
        return self.total_bytes - self.collectives - self.fragmentation - self.reserved

    @property
    def total_bytes(self) -> float:
        return sum(_all_terms(self))

    @property
    def binding(self) -> str:
        return max(TERMS, key=lambda name: getattr(self, name))


TERMS = tuple(field.name for field in fields(MemoryUse) if field.name != "stage")
_all_terms: Callable[[MemoryUse], tuple[float, ...]] = attrgetter(*TERMS)


def longest_batches(jobs: Sequence[JobLoad]) -> int:
    """Rows of all jobs' batches together if every sequence is the longest one."""
    return sum(job.batch_size * job.lengths.longest for job in jobs)


def most_rows(batches: int, plan: Plan) -> float:
    """The most rows of a micro-batch over its CP ranks, by the rows of all batches."""
    if plan.num_micro_batches is not None:
        return float(plan.micro_batch_tokens)
    multiple = ROW_TILE * plan.cp_size
    padded = -(-batches // multiple) * multiple
    return float(min(plan.micro_batch_tokens, padded or plan.micro_batch_tokens))


class _LayerUse(NamedTuple):
    """One layer's share, equal in plans that differ in neither TP, SP, sharding nor recompute."""

    slabs: float
    """Elements, like the next three fields."""
    copies: float
    largest_slab: float
    spread: float
    """Elements of gradients with the zeros between blocks."""
    kept_bytes: float
    """Bytes per row of the micro-batch, like the next two fields."""
    workspace_bytes: float
    places_bytes: float
    routed_bytes: float
    """Further bytes per row that the mean rank keeps of routed experts."""


class MemoryModel:
    """Predicts memory for one mix of jobs on one model and machine; plans share computed parts."""

    def __init__(self, spec: ModelSpec, jobs: Sequence[JobLoad], hardware: HardwareProfile) -> None:
        check_predictable(spec, jobs)
        self.spec = spec
        self.jobs = tuple(jobs)
        self.hardware = hardware
        self._size = hardware.element_bytes
        self._batches = longest_batches(jobs)
        self._layers: dict[object, _LayerUse] = {}
        self._layer_bytes: dict[object, float] = {}

    def use(self, plan: Plan, rows: float | None = None) -> MemoryUse:
        """Predicts the memory of the pipeline stage that needs most.

        `rows` are of a micro-batch over its CP ranks; None: the budget, or all batches together.
        """
        rows = most_rows(self._batches, plan) if rows is None else rows
        in_round = plan.num_micro_batches or 4 * plan.pp_size
        stages = {0, plan.pp_size - 1}
        if not plan.is_even and plan.pp_size > 2:
            stages.add(1)  # of the middle stages, it has most micro-batches in flight
        uses = [self._stage_use(plan, rows / plan.cp_size, in_round, stage) for stage in stages]
        return max(uses, key=lambda use: use.total_bytes)

    def _layer_use(self, plan: Plan) -> _LayerUse:
        key = (
            *(plan.tp_size, plan.sequence_parallel, plan.lora_sharding, plan.recompute),
            *(plan.ep_size, plan.expert_tp_size),
        )
        if key not in self._layers:
            spec, jobs, size = self.spec, self.jobs, self._size
            sharding = plan.tp_size, plan.lora_sharding
            split, saved = expert_split(spec, plan), saved_inputs(spec, jobs, plan)
            on_experts = [expert_elements(spec, job, split).total for job in jobs]
            dense = (adapter_elements(spec, job, *sharding) for job in jobs)
            each = [one + other for one, other in zip(dense, on_experts, strict=True)]
            if split is None or plan.recompute != "none":
                routed = 0.0
            else:
                routed = routed_bytes(split, size, saved.experts).kept_routed
            self._layers[key] = _LayerUse(
                slabs=sum(each),
                copies=sum(
                    copied_elements(spec, job, *sharding) + copied_expert_elements(spec, job, split)
                    for job in jobs
                ),
                largest_slab=max(each, default=0.0),
                spread=sum(spread_elements(spec, job, plan.tp_size) for job in jobs),
                kept_bytes=kept_bytes(spec, saved, plan, size),
                workspace_bytes=workspace_bytes(spec, saved, plan, size),
                places_bytes=saved.places,
                routed_bytes=routed,
            )
        return self._layers[key]

    def _stage_use(self, plan: Plan, local_rows: float, in_round: float, stage: int) -> MemoryUse:
        spec, size, layer = self.spec, self._size, self._layer_use(plan)
        sizes = plan.stages(spec)
        layers = sizes[stage]
        is_first, is_last = stage == 0, stage == plan.pp_size - 1
        flight = chunks_in_flight(plan, stage, in_round)
        places = flight * local_rows * layer.places_bytes
        boundary = spec.hidden_size * size / row_shards(plan) if plan.pp_size > 1 else 0.0
        split, kept = expert_split(spec, plan), layer.kept_bytes
        if split is not None:  # no rank is the fullest in every layer
            kept += layer.routed_bytes * split.fullest(layers)
        activations = flight * local_rows * (layers / plan.vpp_size * kept + boundary)
        slices = plan.num_replicas if plan.shard_optimizer else 1
        # A refreshed slab is cast as one buffer, and cleaned in another, while nothing else runs;
        # before that, slices of it are gathered.
        refresh = layers * layer.largest_slab * (3 if slices > 1 else 2) * size - activations
        workspace = max(local_rows * layer.workspace_bytes, refresh)
        # Logits of some rows, gathered hidden states, and twice all rows' gradients.
        columns, height = -(-spec.vocab_size // plan.tp_size), min(HEAD_ROWS, local_rows)
        head = height * (columns + spec.hidden_size) + 4 * local_rows * spec.hidden_size
        head *= size * is_last
        sizes_of_groups = plan.tp_size, plan.pp_size, plan.cp_size, plan.dp_size, plan.ep_size
        groups = sum(n > 1 for n in sizes_of_groups)
        # A save gathers one fp32 buffer of one adapter at a time, while the next round runs.
        parts = plan.tp_size * plan.pp_size
        received = max(sizes) * parts if is_first and parts > 1 else 0
        gathered = (received + layers * (slices > 1)) * layer.largest_slab * 4
        key = plan.tp_size, plan.ep_size, plan.expert_tp_size
        if key not in self._layer_bytes:
            self._layer_bytes[key] = _layer_bytes(spec, plan, size)
        tables = 1 if is_first and is_last and spec.tied_embeddings else is_first + is_last
        ends = (tables * columns + is_last) * spec.hidden_size * size  # and the last norm
        return MemoryUse(
            base_weights=layers * self._layer_bytes[key] + ends,
            adapter_weights=layers * layer.copies * size,
            adapter_gradients=layers * (layer.slabs + layer.spread) * 4,
            adapter_states=layers * layer.slabs * 12 / slices,
            activations=activations + places,
            workspace=workspace,
            logits=max(0.0, head - workspace),
            collectives=groups * COMMUNICATOR_BYTES + gathered,
            fragmentation=FRAGMENTATION * (activations + max(workspace, head)),
            reserved=self.hardware.reserved_bytes,
            stage=stage,
        )


def _layer_bytes(spec: ModelSpec, plan: Plan, size: int) -> float:
    tp_size, split = plan.tp_size, expert_split(spec, plan)
    names = itertools.chain.from_iterable(dense_linears(spec).values())
    linears = sum(_linear_bytes(spec, linear, tp_size, size) for linear in names)
    # The weight of a shared expert's sigmoid is whole on every rank.
    sigmoid = 0 if spec.shared_ffn_size is None else spec.hidden_size
    linears += 0 if split is None else (split.weights + sigmoid) * size
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = (spec.q_size + 2 * spec.kv_size) / tp_size if spec.qkv_bias else 0
    return linears + (norms + biases) * size


def _linear_bytes(spec: ModelSpec, linear: str, tp_size: int, size: int) -> float:
    """Bytes of a frozen linear's weight on one rank: elements, or codes and scales."""
    columns, inner = local_shape(spec, linear, tp_size)
    share = spec.fp8_share(linear)
    in_blocks = math.ceil(columns / BLOCK[0]) * math.ceil(inner / BLOCK[1])
    scales = in_blocks if spec.fp8_in_blocks else columns
    codes = columns * inner + scales * SCALE_BYTES
    return share * codes + (1.0 - share) * columns * inner * size


def chunks_in_flight(plan: Plan, stage: int, in_round: float) -> float:
    """The most micro-batches of one model chunk whose activations a stage holds, under 1F1B.

    Interleaved, it is Megatron's warm-up of `2 (pp - stage - 1) + (vpp - 1) pp` and the one that
    runs.
    """
    if plan.pp_size == 1:
        return 1.0
    behind = plan.pp_size - stage - 1
    if plan.vpp_size == 1:
        return min(in_round, behind + 1)
    return min(in_round * plan.vpp_size, 2 * behind + (plan.vpp_size - 1) * plan.pp_size + 1)


def row_shards(plan: Plan) -> int:
    """Number of tensor-parallel ranks that share the rows between tensor-parallel regions."""
    return plan.tp_size if plan.sequence_parallel else 1


class SavedInputs(NamedTuple):
    """Tensors that linears with adapters keep for backward."""

    ranks: dict[str, float]
    """Elements of s per row, by linear: columns of the widest rank, and of each row's own in whole
    chunks; 0 without adapters."""
    whole: frozenset[str]
    """Linears whose input is kept gathered under sequence parallelism (`keeps_whole`)."""
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
