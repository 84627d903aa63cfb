"""Counts how a plan's process groups lie over nodes: what each node holds, which hops leave it.

`tlora train` and Megatron-LM place ranks alike (Megatron's order tp-cp-ep-dp-pp): tensor-parallel
neighbours are next to each other, then context-parallel ones, replicas, and stages last. A node
holds `gpus_per_node` consecutive ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from tlora_megatron.config.parallel_rules import MOST_TP, exact_shardings
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import (
    EVEN,
    Ends,
    Plan,
    Runner,
    divisions,
    head_layers,
    misfit,
    pipeline_sizes,
)
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.workload import JobLoad


class Span(NamedTuple):
    """A kind of process group over nodes. All of a kind run at once, so the worst one counts."""

    ranks: int
    nodes: int = 1
    """Most nodes that a group touches."""
    local: int = 1
    """Fewest of its GPUs on a node that it touches."""


class PlanSpans(NamedTuple):
    tp: Span
    cp: Span
    replicas: Span
    """Data- and context-parallel ranks together, which sum adapters' gradients."""
    hops: tuple[bool, ...]
    """For every stage, True if a rank's next stage is on another node; the last one's is the first
    stage. Empty without a pipeline."""


def plan_spans(plan: Plan, gpus_per_node: int) -> PlanSpans:
    """Returns how the groups of a plan lie over nodes of so many GPUs."""
    return _spans(plan.tp_size, plan.cp_size, plan.dp_size, plan.pp_size, gpus_per_node)


@lru_cache(maxsize=4096)
def _spans(tp: int, cp: int, dp: int, pp: int, gpus_per_node: int) -> PlanSpans:
    num_gpus = tp * cp * dp * pp
    return PlanSpans(
        tp=group_span(tp, 1, num_gpus, gpus_per_node),
        cp=group_span(cp, tp, num_gpus, gpus_per_node),
        replicas=group_span(cp * dp, tp, num_gpus, gpus_per_node),
        hops=crossing_hops(pp, num_gpus // pp, gpus_per_node),
    )


@lru_cache(maxsize=4096)
def group_span(ranks: int, stride: int, num_gpus: int, gpus_per_node: int) -> Span:
    """Returns the span of all groups of `ranks` GPUs that are `stride` apart on `num_gpus`."""
    block = ranks * stride
    if num_gpus <= gpus_per_node or gpus_per_node % block == 0:
        return Span(ranks, 1, ranks)
    nodes, local = 1, ranks
    for begin in range(0, num_gpus, block):
        for first in range(begin, begin + stride):
            held: dict[int, int] = {}
            for gpu in range(first, begin + block, stride):
                node = gpu // gpus_per_node
                held[node] = held.get(node, 0) + 1
            nodes, local = max(nodes, len(held)), min(local, *held.values(), ranks)
    return Span(ranks, nodes, local)


def crossing_hops(stages: int, stage_gpus: int, gpus_per_node: int) -> tuple[bool, ...]:
    """Returns for every stage whether some rank's next stage is on another node."""
    if stages == 1:
        return ()
    # Ranks of stage i are [i, i + 1) x stage_gpus, those that they send to one stage_gpus further.
    inner = tuple(
        ((i + 2) * stage_gpus - 1) // gpus_per_node > i * stage_gpus // gpus_per_node
        for i in range(stages - 1)
    )
    return (*inner, stages * stage_gpus > gpus_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Values that the search must keep to; None: the search chooses."""

    tp_size: int | None = None
    pp_size: int | None = None
    vpp_size: int | None = None
    cp_size: int | None = None
    ep_size: int | None = None
    expert_tp_size: int | None = None
    """Tensor-parallel ranks that share each routed expert: 1, or all of them."""
    sequence_parallel: bool | None = None
    lora_sharding: LoraSharding | None = None
    recompute: Recompute | None = None
    micro_batch_tokens: int | None = None
    largest_portion: int | None = None
    """Tokens that each micro-batch must hold, as `portion_tokens` of a job asks."""
    runs_in: Runner | None = None
    """Keep only plans that this program can run."""
    shard_optimizer: Literal[True] | None = None
    """Replicas, where there are several, divide adapters' master weights and moments; None: not."""
    deterministic: Literal[True] | None = None
    """Keep only plans that `run.deterministic` does not refuse."""

    def __post_init__(self) -> None:
        names = ("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "expert_tp_size")
        for name in (*names, "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def wants(self, runner: Runner) -> bool:
        """True if plans of a program are looked for."""
        return self.runs_in in (None, runner)

    def allows(self, plan: Plan) -> bool:
        """True if the plan keeps to the fixed values."""
        most_tp = 1 if self.runs_in == "deepspeed" else MOST_TP
        if self.deterministic and (plan.tp_size > most_tp or plan.cp_size > 1):
            return False
        if self.expert_tp_size not in (None, plan.expert_tp):
            return False
        fixed = ("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "sequence_parallel")
        return all(getattr(self, name) in (None, getattr(plan, name)) for name in fixed)

    def can_run(self, plan: Plan) -> bool:
        """True if `runs_in` can run the plan, whose recompute and sharding have been chosen."""
        exact = plan.tp_size == 1 or plan.lora_sharding in exact_shardings(plan.sequence_parallel)
        if self.deterministic and not exact:
            return False
        return self.runs_in is None or self.runs_in in plan.runs_in


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the planner: a base, jobs, a number of GPUs of a kind, and what is fixed."""

    spec: ModelSpec
    jobs: Sequence[JobLoad]
    hardware: HardwareProfile
    num_gpus: int
    space: SearchSpace = field(default_factory=SearchSpace)


_MOST_CP = 512
"""Most context-parallel ranks of layouts that leave GPUs idle."""
_FEW_SEQUENCES = 8
"""Sequences for each replica or micro-batch below which fewer replicas may do as well."""


class Layouts:
    """The layouts of one model, mix of jobs and machine."""

    def __init__(self, question: Question) -> None:
        self._spec, self._hardware = question.spec, question.hardware
        self._space, jobs = question.space, question.jobs
        self.sequences = sum(job.batch_size for job in jobs)
        """Sequences of all batches."""
        rows = sum(job.batch_tokens for job in jobs)
        shares = sum(job.target_share * job.batch_tokens for job in jobs) / rows
        self._head = head_layers(self._spec, shares)

    def on_all(self, num_gpus: int) -> Iterator[Plan]:
        """All sizes whose product is the number of GPUs, those that the model rules out too."""
        divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
        for tp in divisors:
            for pp in (n for n in divisors if num_gpus % (tp * n) == 0):
                for cp in (n for n in divisors if num_gpus % (tp * pp * n) == 0):
                    yield from self._of_sizes(tp, pp, cp, num_gpus // (tp * pp * cp))

    def on_fewer(self, num_gpus: int) -> Iterator[Plan]:
        """Layouts that use fewer GPUs, as few more as possible being left idle.

        TP takes all sizes of the model, PP those of `pipeline_sizes`, CP powers of two. Replicas
        are as many as there is room for, as few as hold equally many sequences each, and if there
        are few sequences a half, a fourth and so on.
        """
        spec, space = self._spec, self._space
        cut = math.gcd(spec.num_heads, spec.num_kv_heads)
        if spec.experts is None:
            cut = math.gcd(cut, spec.ffn_size)
        pipelines = {*pipeline_sizes(spec.num_layers, self._head, num_gpus), space.pp_size or 1}
        contexts = {2**n for n in range(_MOST_CP.bit_length())} | {space.cp_size or 1}
        for tp in (n for n in range(1, num_gpus + 1) if cut % n == 0):
            for pp in sorted(pipelines):
                for cp in sorted(contexts):
                    for dp in self._replicas(tp * pp * cp, pp, num_gpus):
                        yield from self._of_sizes(tp, pp, cp, dp)

    def _of_sizes(self, tp: int, pp: int, cp: int, dp: int) -> Iterator[Plan]:
        space = self._space
        shards_states = space.shard_optimizer or space.runs_in == "deepspeed"  # by ZeRO-1
        ways = divisions(self._spec.num_layers, pp, self._head) or (EVEN,)
        for ends in ways if space.runs_in != "deepspeed" else (EVEN,):
            for vpp in self._vpp_sizes(pp, ends):
                for sequence_parallel in (False, True) if tp > 1 else (False,):
                    plan = Plan(
                        tp_size=tp,
                        pp_size=pp,
                        vpp_size=vpp,
                        first_stage_layers=ends.first,
                        last_stage_layers=ends.last,
                        cp_size=cp,
                        dp_size=dp,
                        sequence_parallel=sequence_parallel,
                        shard_optimizer=bool(shards_states) and dp * cp > 1,
                    )
                    yield from filter(space.allows, with_experts(self._spec, plan))

    def _vpp_sizes(self, pp_size: int, ends: Ends) -> list[int]:
        layers, rest = divmod(self._spec.num_layers, pp_size)
        if not self._space.wants("megatron") or ends != EVEN or pp_size == 1 or rest:
            return [1]
        return [n for n in range(1, layers + 1) if layers % n == 0]

    def _replicas(self, gpus: int, pp_size: int, num_gpus: int) -> list[int]:
        """Numbers of replicas of so many GPUs each, which use fewer GPUs than there are."""
        most = num_gpus // gpus
        if most == 0:
            return []
        each = -(-self.sequences // most)
        wanted = {most}
        if each < _FEW_SEQUENCES:
            wanted.add(-(-self.sequences // each))
        if self.sequences < _FEW_SEQUENCES * most * pp_size:
            wanted |= {most >> halvings for halvings in range(1, most.bit_length())}
        # The GPUs of all replicas fill whole hosts, or are part of one.
        host = self._hardware.host_gpus
        step = host // math.gcd(host, gpus)
        startable = {
            n if gpus * n <= host else n // step * step or max(0, host // gpus) for n in wanted
        }
        return sorted(n for n in startable if n and n * gpus < num_gpus)


def with_experts(spec: ModelSpec, plan: Plan) -> Iterator[Plan]:
    """Yields a layout with all ways to share routed experts; itself where there are none."""
    experts = spec.experts
    if experts is None:
        yield plan
        return
    cuts: tuple[Literal[1] | None, ...] = (None, 1) if plan.sequence_parallel else (None,)
    for expert_tp_size in cuts:
        cut = replace(plan, expert_tp_size=expert_tp_size)
        most = plan.num_gpus // plan.pp_size // cut.expert_tp
        for ep in range(1, min(most, experts.num_experts) + 1):
            if most % ep == 0 and experts.num_experts % ep == 0:
                yield replace(cut, ep_size=ep)


def layout_misfit(spec: ModelSpec, layout: Plan, hardware: HardwareProfile) -> str | None:
    """The reason why no plan of a layout can run; None if some can."""
    if layout.num_gpus > hardware.gpus_per_node and hardware.inter_node is None:
        return (
            f"{layout.num_gpus} GPUs are more than the {hardware.gpus_per_node} of a node, "
            f"and profile {hardware.name} has no inter_node link"
        )
    return misfit(spec, replace(layout, micro_batch_tokens=2 * layout.tp_size * layout.cp_size))
