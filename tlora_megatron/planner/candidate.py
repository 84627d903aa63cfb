"""Plans: the ways to run the super-model to choose from, and their stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tlora_megatron.config.schema import Recompute, shared_fields
from tlora_megatron.model.layout import LoraSharding, ParallelLayout, stage_sizes
from tlora_megatron.model.quantisation import cut_block
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.workload import JobLoad

RoundDepth = Literal[1, 2, 4]
DEPTHS: tuple[RoundDepth, ...] = get_args(RoundDepth)
Runner = Literal["train", "megatron", "deepspeed"]
"""The programs that run a plan: `tlora train`, a Megatron-LM script, or DeepSpeed."""
SHARDINGS: tuple[LoraSharding, ...] = get_args(LoraSharding)
"""LoRA shardings; the one that exchanges least comes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A way to run one super-model: layout, micro-batch budget and memory savings."""

    tp_size: int = 1
    pp_size: int = 1
    vpp_size: int = 1
    """Model chunks of each pipeline stage; 1: not interleaved."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as of each middle one."""
    last_stage_layers: int | None = None
    cp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    """Ranks that share the routed experts of a layer."""
    expert_tp_size: Literal[1] | None = None
    """Tensor-parallel ranks that share each routed expert; None: all of them."""
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192
    """Most rows of a packed micro-batch, over its context-parallel ranks together."""
    recompute: Recompute = "none"
    num_nano_batches: int = 1
    """The number predicted to be fastest; a run with `nano_batches: auto` decides itself."""
    lora_sharding: LoraSharding = "fold"
    """LoRA sharding of standard adapters."""
    shard_optimizer: bool = False
    """Adapters' master weights and moments lie in slices on the replicas."""
    round_depth: RoundDepth = 1
    """Micro-batches of a replica in a round; more than 1 are shared out by predicted time."""
    num_micro_batches: int | None = None
    """Micro-batches of a replica in every round, each of `micro_batch_tokens` rows whatever there
    is, as Megatron-LM's trainer fixes both; None = as many and as long as the work needs."""

    @property
    def num_gpus(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    @property
    def expert_tp(self) -> int:
        """Number of tensor-parallel ranks that share each routed expert."""
        return self.expert_tp_size or self.tp_size

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same parts of adapters."""
        return self.dp_size * self.cp_size

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the run's processes, which virtual stages are no part of."""
        return ParallelLayout(**shared_fields(self, ParallelLayout))

    @property
    def is_even(self) -> bool:
        """True if all pipeline stages are to have equally many layers."""
        return self.first_stage_layers is None and self.last_stage_layers is None

    def stages(self, spec: ModelSpec) -> tuple[int, ...]:
        """Number of layers of every pipeline stage."""
        ends = self.first_stage_layers, self.last_stage_layers
        return stage_sizes(spec.num_layers, self.pp_size, *ends)

    @property
    def runs_in(self) -> tuple[Runner, ...]:
        """The programs that run the plan in the time that is predicted for it.

        Only Megatron-LM's trainer has virtual stages and a fixed number of micro-batches, and only
        `tlora train` deep rounds.
        DeepSpeed's engine has tensor and data parallelism only, without sequence parallelism and
        nano-batches; it shards by fold and recomputes everything or nothing.
        """
        if self.num_micro_batches is not None or self.vpp_size > 1:
            return ("megatron",)
        if self.round_depth > 1:
            return ("train",)
        plain = self.pp_size == self.cp_size == self.num_nano_batches == 1
        plain = plain and self.lora_sharding == "fold"
        if plain and not self.sequence_parallel and self.recompute != "selective":
            return ("train", "deepspeed")
        return ("train",)

    @property
    def label(self) -> str:
        """Short form, for example `TP2+SP PP1 DP4, 8192 tokens, selective`."""
        sizes = [f"TP{self.tp_size}" + ("+SP" if self.sequence_parallel else "")]
        sizes.append(f"PP{self.pp_size}" + (f"x{self.vpp_size}" if self.vpp_size > 1 else ""))
        if not self.is_even:
            ends = (self.first_stage_layers, self.last_stage_layers)
            first, last = ("" if n is None else n for n in ends)
            sizes[-1] += f" ({first}-{last} layers at its ends)"
        sizes += [f"CP{self.cp_size}"] if self.cp_size > 1 else []
        sizes.append(f"DP{self.dp_size}")
        if self.ep_size > 1:
            sizes.append(f"EP{self.ep_size}")
        if self.expert_tp < self.tp_size:
            sizes.append("whole experts")
        fixed = self.num_micro_batches
        full = "" if fixed is None else f"{fixed} micro-batch{'es' * (fixed > 1)} of "
        parts = [" ".join(sizes), f"{full}{self.micro_batch_tokens} tokens"]
        if self.lora_sharding != "fold":
            parts.append(self.lora_sharding)
        if self.shard_optimizer:
            parts.append("sharded optimizer")
        if self.num_nano_batches > 1:
            parts.append(f"{self.num_nano_batches} nano-batches")
        if self.round_depth > 1:
            parts.append(f"rounds of {self.round_depth}")
        return ", ".join([*parts, f"recompute {self.recompute}"])


def runners(spec: ModelSpec, plan: Plan) -> tuple[Runner, ...]:
    """Returns the programs that can run the plan of a model."""
    return tuple(name for name in plan.runs_in if name == "train" or not is_ours_alone(spec))


def is_ours_alone(spec: ModelSpec) -> bool:
    """True for a model that only `tlora train` plans for: with FP8 linears, or routed experts."""
    return bool(spec.fp8_linears) or spec.experts is not None


def misfit(spec: ModelSpec, plan: Plan) -> str | None:
    """The reason why a model cannot be split as a plan says; None if it can."""
    for name, size, ranks in (
        ("num_heads", spec.num_heads, plan.tp_size),
        ("num_kv_heads", spec.num_kv_heads, plan.tp_size),
        ("ffn_size", spec.ffn_size, plan.expert_tp),
        ("shared_ffn_size", spec.shared_ffn_size or 0, plan.tp_size),
    ):
        if size % ranks:
            return f"{name} {size} is no multiple of TP {ranks}"
    reason = _expert_misfit(spec, plan)
    if reason is not None:
        return reason
    if spec.fp8_in_blocks:
        cut = cut_block(spec, dict(spec.fp8_linears), plan.tp_size)
        if cut is not None:
            return f"{cut[0]} {cut[1]} is no multiple of 128, a block of FP8 scales"
    if plan.is_even and spec.num_layers % plan.pp_size:
        return f"num_layers {spec.num_layers} is no multiple of PP {plan.pp_size}"
    if not plan.is_even and plan.vpp_size > 1:
        return "virtual stages are of even stages"
    if plan.vpp_size > 1 and plan.pp_size == 1:
        return "virtual stages need a pipeline"
    if plan.vpp_size > 1 and is_ours_alone(spec):
        what = "no base in FP8" if spec.fp8_linears else "no plans for routed experts here"
        return f"virtual stages are Megatron-LM's, which has {what}"
    if spec.num_layers // plan.pp_size % plan.vpp_size:
        layers = spec.num_layers // plan.pp_size
        return f"{layers} layers a stage are no multiple of VPP {plan.vpp_size}"
    if plan.lora_sharding != "fold" and plan.tp_size == 1:
        return f"{plan.lora_sharding} needs tensor parallelism"
    if plan.sequence_parallel and plan.tp_size == 1:
        return "sequence parallelism needs tensor parallelism"
    if plan.vpp_size > 1 and (plan.num_micro_batches or plan.pp_size) % plan.pp_size:
        return f"{plan.num_micro_batches} micro-batches are no multiple of PP {plan.pp_size}"
    multiple = chunk_multiple(plan)
    if plan.micro_batch_tokens % multiple:
        return f"{plan.micro_batch_tokens} tokens are no multiple of {multiple} ranks' chunks"
    return None


def _expert_misfit(spec: ModelSpec, plan: Plan) -> str | None:
    """The reason why experts cannot be shared as a plan says."""
    if spec.experts is None:
        shares = plan.ep_size > 1 or plan.expert_tp_size is not None
        return "a dense base has no experts to share" if shares else None
    if spec.experts.num_experts % plan.ep_size:
        return f"num_experts {spec.experts.num_experts} is no multiple of EP {plan.ep_size}"
    ranks, shared = plan.num_gpus // plan.pp_size, plan.ep_size * plan.expert_tp
    if ranks % shared:
        return f"{ranks} ranks of a stage are no multiple of {shared}, which share its experts"
    if plan.expert_tp < plan.tp_size and not plan.sequence_parallel:
        return "whole experts on tensor-parallel ranks need sequence parallelism"
    return None


def job_misfit(jobs: Iterable[JobLoad], plan: Plan) -> str | None:
    """The reason why jobs cannot run under a plan; None if they can."""
    shards_over_experts = plan.shard_optimizer and plan.ep_size > 1
    for job in jobs:
        if job.num_blocks > 1 and job.num_blocks % plan.tp_size:
            blocks = f"num_blocks {job.num_blocks} of job {job.name}"
            return f"{blocks} is no multiple of TP {plan.tp_size}"
        if shards_over_experts and any(t.startswith("experts.") for t in job.targets):
            return "sharded optimizer states of adapters on routed experts need EP 1"
    return None


def chunk_multiple(plan: Plan) -> int:
    """The number whose multiple a micro-batch's rows must be: every CP rank has two chunks."""
    return plan.tp_size * plan.cp_size * (2 if plan.cp_size > 1 else 1)


class Ends(NamedTuple):
    """Layers of the first and the last stage; None: as many as each of the others."""

    first: int | None = None
    last: int | None = None


EVEN = Ends()


def head_layers(spec: ModelSpec, target_share: float) -> float:
    """Layers whose GEMMs take as long as the head's, which a share of rows with targets reaches."""
    return target_share * spec.vocab_size * spec.hidden_size / spec.row_weights


@functools.lru_cache(maxsize=4096)
def divisions(num_layers: int, pp_size: int, head: float) -> tuple[Ends, ...]:
    """Ways to divide layers that are worth trying: alike, and with the slowest stage fastest.

    Megatron-core lets the first and the last stage have a number of layers of their own. The head
    counts for `head` layers. Without an entry there are fewer layers than stages.
    """
    found = []
    slowest = math.inf
    if num_layers % pp_size == 0:
        found.append(EVEN)
        slowest = num_layers // pp_size + head
    if pp_size > 1:
        uneven = _fastest(num_layers, pp_size, head)
        if uneven is not None and uneven[0] < slowest - 1e-9:
            found.append(uneven[1])
    return tuple(found)


def _fastest(num_layers: int, pp_size: int, head: float) -> tuple[float, Ends] | None:
    """The uneven division whose slowest stage is fastest, in layers; then the most even one."""
    best: tuple[float, int, Ends] | None = None
    middles = range(1, (num_layers - 2) // (pp_size - 2) + 1) if pp_size > 2 else (0,)
    for middle in middles:
        ends = num_layers - middle * (pp_size - 2)
        even = (ends - head) / 2
        for last in {min(max(n, 1), ends - 1) for n in (math.floor(even), math.ceil(even))}:
            slowest = max(ends - last, last + head, middle)
            found = slowest, abs(ends - 2 * last), Ends(ends - last, last)
            if best is None or found < best:
                best = found
    return None if best is None else (best[0], best[2])


def pipeline_sizes(num_layers: int, head: float, most: int) -> list[int]:
    """Numbers of stages up to `most` that are worth trying where any number of GPUs may be used.

    They divide the layers, or are the fewest with which the slowest stage has so few layers.
    """
    sizes = {n for n in range(1, num_layers + 1) if num_layers % n == 0}
    for layers in range(1, num_layers + 1):
        sizes |= {-(-num_layers // layers), math.ceil((num_layers + head) / layers)}
    return sorted(n for n in sizes if n <= min(most, num_layers))
