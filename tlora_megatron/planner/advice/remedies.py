"""Changes that make a plan fit: other choices, fewer jobs, shorter sequences, other machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import MOST_GPUS
from tlora_megatron.planner.space import SearchSpace
from tlora_megatron.planner.workload import JobLoad

_GIB = 2.0**30
_LAYOUT: dict[str, Any] = dict.fromkeys(
    (
        *("tp_size", "pp_size", "vpp_size", "cp_size", "ep_size", "expert_tp_size"),
        *("sequence_parallel", "lora_sharding"),
    )
)
_CHOICES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("leave recompute free", {"recompute": None}),
    ("leave micro_batch_tokens free", {"micro_batch_tokens": None}),
    (
        "leave recompute and micro_batch_tokens free",
        {"recompute": None, "micro_batch_tokens": None},
    ),
    ("leave the layout free", _LAYOUT),
    ("set parallel.shard_optimizer: true", {"shard_optimizer": True}),
    ("give smaller portion_tokens", {"largest_portion": None}),
    ("set run.deterministic: false", {"deterministic": None}),
    ("leave the program free (--runs-in any)", {"runs_in": None}),
)
FREE: dict[str, Any] = _LAYOUT | {"recompute": None, "micro_batch_tokens": None}
"""The space in which the planner chooses everything that it can choose."""
_NAMED = 8
"""Jobs that a sentence names; further ones are counted."""
SHORTEST = 256
"""Sequences are not proposed to be cut below this length, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question to the planner: a base, jobs, a number of GPUs of a kind, and what is fixed."""

    spec: ModelSpec
    jobs: tuple[JobLoad, ...]
    hardware: HardwareProfile
    num_gpus: int
    space: SearchSpace


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which a plan fits."""

    text: str
    question: Question
    """The question with the change."""
    plan: Plan
    """A plan that fits then."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Change:
    """A change that has not been planned with."""

    text: str
    question: Question
    """The question with the change."""


Ask = Callable[[Question], Plan | None]
"""Plans for a question; returns a plan that fits, or None."""


def other_choices(question: Question, ask: Ask) -> Iterator[Remedy]:
    """Proposes to leave open what is fixed, or to shard: the fewest values that are enough."""
    helped: list[dict[str, Any]] = []
    for text, values in _CHOICES:
        if any(smaller.items() <= values.items() for smaller in helped):
            continue
        freer = replace(question, space=replace(question.space, **values))
        plan = None if freer == question else ask(freer)
        if plan is not None:
            helped.append(values)
            yield Remedy(f"{text}: {plan.label} fits", freer, plan)


def fewer_jobs(question: Question, ask: Ask) -> Iterator[Remedy]:
    """Proposes to leave out the largest adapters, as few of them as possible."""
    jobs = question.jobs
    ordered = sorted(jobs, key=lambda job: job.rank * len(job.targets))
    low, high, found = 0, len(ordered), None
    while low + 1 < high:
        middle = (low + high) // 2
        fewer = replace(question, jobs=tuple(ordered[:middle]))
        plan = ask(fewer)
        if plan is not None:
            low, found = middle, (fewer, plan)
        else:
            high = middle
    if found is not None:
        names = [job.name for job in ordered[low:]]
        left_out = ", ".join(names[:_NAMED])
        left_out += f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield Remedy(f"run {low} of the {len(jobs)} jobs at once, without {left_out}", *found)


def shorter(question: Question, ask: Ask) -> Iterator[Remedy]:
    """Proposes to cut the longest sequences to a power of two, as little as possible."""
    jobs = question.jobs
    longest = max(max(job.lengths.longest, job.longest_eval) for job in jobs)
    length = 2 ** (longest.bit_length() - 1)
    while length >= SHORTEST:
        if length < longest:
            cut = replace(question, jobs=tuple(_cut(job, length) for job in jobs))
            plan = ask(cut)
            if plan is not None:
                yield Remedy(f"cut sequences to {length} tokens (max_seq_len)", cut, plan)
                return
        length //= 2


def _cut(job: JobLoad, length: int) -> JobLoad:
    longest_eval = min(job.longest_eval, length)
    return replace(job, lengths=job.lengths.clipped(length), longest_eval=longest_eval)


def one_node(
    question: Question, ask: Ask, profiles: tuple[HardwareProfile, ...]
) -> Iterator[Remedy]:
    """Proposes what helps where the GPUs are more than a node has and nothing joins nodes."""
    hardware = question.hardware
    node = hardware.gpus_per_node
    if hardware.inter_node is not None or question.num_gpus <= node:
        return
    within = replace(question, num_gpus=node)
    plan = ask(within)
    if plan is not None:
        yield Remedy(f"use the {node} GPUs of a node", within, plan)
    joined = with_link(question, profiles)
    plan = None if joined is None else ask(joined.question)
    if joined is not None and plan is not None:
        yield Remedy(joined.text, joined.question, plan)


def with_link(question: Question, profiles: Iterable[HardwareProfile]) -> Change | None:
    """The change that joins nodes, by a profile of the same GPU if one does; None where joined."""
    hardware = question.hardware
    if hardware.inter_node is not None:
        return None
    joining = (p for p in profiles if p.gpu == hardware.gpu and p.inter_node is not None)
    room = hardware.memory_bytes
    known = next((p for p in joining if isclose(p.memory_bytes, room, rel_tol=0.01)), None)
    if known is not None:
        text = f"use profile {known.name}, the same GPUs with a network between nodes"
        return Change(text, replace(question, hardware=known))
    # Any link will do here: what fits does not depend on its speed.
    joined = replace(question, hardware=replace(hardware, inter_node=hardware.intra_node))
    return Change(f"write inter_node, the link between nodes, into profile {hardware.name}", joined)


def more_gpus(
    question: Question, ask: Ask, profiles: tuple[HardwareProfile, ...] = ()
) -> Iterator[Remedy]:
    """Proposes the next larger number of GPUs that is enough.

    Args:
        profiles: machines whose network may join the nodes where the question's has none.
    """
    hardware = question.hardware
    for gpus in larger_numbers(question.num_gpus, hardware):
        more = replace(question, num_gpus=gpus)
        plan = ask(more)
        if plan is not None:
            nodes = gpus // hardware.gpus_per_node
            where = f" ({nodes} nodes)" if nodes > 1 else ""
            yield Remedy(f"use {gpus} GPUs{where}", more, plan)
            return
    joined = with_link(question, profiles) if question.num_gpus <= hardware.gpus_per_node else None
    if joined is not None and joined.question.hardware in profiles:
        node = replace(joined.question, num_gpus=hardware.gpus_per_node)
        for remedy in more_gpus(node, ask):
            yield replace(remedy, text=f"{joined.text}, and {remedy.text}")


def larger_numbers(num_gpus: int, hardware: HardwareProfile) -> Iterator[int]:
    """Larger numbers of GPUs: every number within a node, then whole nodes."""
    node = hardware.gpus_per_node
    yield from range(num_gpus + 1, node + 1)
    nodes = 1
    while hardware.inter_node is not None and nodes * node < MOST_GPUS:
        # 2, 3, 4, 6, 8, 12, 16, ... nodes
        nodes = nodes // 2 * 3 if nodes.bit_count() == 1 and nodes > 1 else 2 ** nodes.bit_length()
        if num_gpus < nodes * node <= MOST_GPUS:
            yield nodes * node


def other_machines(
    question: Question, ask: Ask, profiles: tuple[HardwareProfile, ...]
) -> Iterator[Remedy]:
    """Proposes the machine with the smallest GPUs that are enough, as many as were asked for."""
    for change in roomier(question, profiles):
        plan = ask(change.question)
        if plan is not None:
            yield Remedy(change.text, change.question, plan)
            return


def roomier(question: Question, profiles: tuple[HardwareProfile, ...]) -> list[Change]:
    """Changes to machines with larger GPUs, the smallest of these first."""
    larger = [p for p in profiles if p.memory_bytes > question.hardware.memory_bytes]
    return [
        Change(
            f"use GPUs like profile {profile.name}: {profile.gpu}, "
            f"{profile.memory_bytes / _GIB:.1f} GiB each",
            replace(question, hardware=profile),
        )
        for profile in sorted(larger, key=lambda p: (p.memory_bytes, p.inter_node is not None))
    ]
