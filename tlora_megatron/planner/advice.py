"""Says what would make a plan fit where none does, or why nothing that can be changed helps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import isclose
from typing import Any

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.fit import Dropped, Drops, Fit
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.layouts import Question
from tlora_megatron.planner.search import MOST_GPUS
from tlora_megatron.planner.workload import longest_of

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


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which a plan fits, or may fit."""

    text: str
    question: Question
    """The question with the change."""
    plan: Plan | None = None
    """A plan that fits then; None: it has not been planned with."""


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
        fewer = replace(question, jobs=ordered[:middle])
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
    longest = longest_of(jobs)
    length = 2 ** (longest.bit_length() - 1)
    while length >= SHORTEST:
        if length < longest:
            cut = replace(
                question,
                jobs=[
                    replace(
                        job,
                        lengths=job.lengths.clipped(length),
                        longest_eval=min(job.longest_eval, length),
                    )
                    for job in jobs
                ],
            )
            plan = ask(cut)
            if plan is not None:
                yield Remedy(f"cut sequences to {length} tokens (max_seq_len)", cut, plan)
                return
        length //= 2


def one_node(question: Question, ask: Ask, profiles: Sequence[HardwareProfile]) -> Iterator[Remedy]:
    """Proposes what helps where the GPUs are more than a node has and nothing joins nodes."""
    hardware = question.hardware
    node = hardware.gpus_per_node
    if hardware.inter_node is not None or question.num_gpus <= node:
        return
    within = replace(question, num_gpus=node)
    plan = ask(within)
    if plan is not None:
        yield Remedy(f"use the {node} GPUs of a node", within, plan)
    yield from _first_that_fits([with_link(question, profiles)], ask)


def _first_that_fits(changes: Iterable[Remedy], ask: Ask) -> Iterator[Remedy]:
    planned = (replace(change, plan=ask(change.question)) for change in changes)
    yield from islice((change for change in planned if change.plan is not None), 1)


def with_link(question: Question, profiles: Iterable[HardwareProfile]) -> Remedy:
    """The change that joins nodes that nothing joins, by a profile of the same GPU if one does."""
    hardware = question.hardware
    joining = (p for p in profiles if p.gpu == hardware.gpu and p.inter_node is not None)
    room = hardware.memory_bytes
    known = next((p for p in joining if isclose(p.memory_bytes, room, rel_tol=0.01)), None)
    if known is not None:
        text = f"use profile {known.name}, the same GPUs with a network between nodes"
        return Remedy(text, replace(question, hardware=known))
    # Any link will do here: what fits does not depend on its speed.
    joined = replace(question, hardware=replace(hardware, inter_node=hardware.intra_node))
    return Remedy(f"write inter_node, the link between nodes, into profile {hardware.name}", joined)


def more_gpus(
    question: Question, ask: Ask, profiles: Sequence[HardwareProfile] = ()
) -> Iterator[Remedy]:
    """Proposes the next larger number of GPUs that is enough, on `profiles`' networks."""
    hardware = question.hardware
    for gpus in larger_numbers(question.num_gpus, hardware):
        more = replace(question, num_gpus=gpus)
        plan = ask(more)
        if plan is not None:
            nodes = gpus // hardware.gpus_per_node
            where = f" ({nodes} nodes)" if nodes > 1 else ""
            yield Remedy(f"use {gpus} GPUs{where}", more, plan)
            return
    if hardware.inter_node is not None or question.num_gpus > hardware.gpus_per_node:
        return
    joined = with_link(question, profiles)
    if joined.question.hardware in profiles:
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


def roomier(question: Question, profiles: Sequence[HardwareProfile]) -> list[Remedy]:
    """Changes to machines with larger GPUs, the smallest of these first."""
    larger = [p for p in profiles if p.memory_bytes > question.hardware.memory_bytes]
    return [
        Remedy(
            f"use GPUs like profile {profile.name}: {profile.gpu}, "
            f"{profile.memory_bytes / _GIB:.1f} GiB each",
            replace(question, hardware=profile),
        )
        for profile in sorted(larger, key=lambda p: (p.memory_bytes, p.inter_node is not None))
    ]


@dataclass(frozen=True, slots=True)
class Advice:
    """Help for a question that no plan answers."""

    remedies: tuple[Remedy, ...]
    """Changes with each of which a plan fits, the smallest of each kind."""
    why_none: str = ""
    """The reason why there is none, if there is none."""

    def __str__(self) -> str:
        if self.why_none:
            return self.why_none
        return f"What would fit: {'; or '.join(own.text for own in self.remedies)}"


def advise(question: Question, machines: Sequence[HardwareProfile] = ()) -> Advice:
    """Looks for changes that make a plan fit, or two together; each one has been planned with.

    `machines` are others that may be proposed. Raises `ValueError` as `search` does.
    """
    hunt = _Hunt()
    # The smallest change of each kind that is enough, the cheapest kind first.
    single = chain(
        other_choices(question, hunt.ask),
        fewer_jobs(question, hunt.ask),
        shorter(question, hunt.ask),
        one_node(question, hunt.ask, machines),
        more_gpus(question, hunt.ask, machines),
        _first_that_fits(roomier(question, machines), hunt.ask),
    )
    found = tuple(single) or tuple(_pairs(question, hunt.ask, machines))
    return Advice(found, "" if found else _why_none(question, machines, hunt))


def _pairs(question: Question, ask: Ask, profiles: Sequence[HardwareProfile]) -> Iterator[Remedy]:
    """Two changes that are enough together, beside the planner's own choice of all it may choose.

    Of numbers of GPUs the largest within three steps is tried, of machines the one with most room.
    """
    freer = replace(question, space=replace(question.space, **FREE))
    freed = "" if freer == question else "leave layout, recompute and micro_batch_tokens free, and "
    if freed:
        yield from _behind(
            freed, fewer_jobs(freer, ask), shorter(freer, ask), more_gpus(freer, ask)
        )
    numbers = [*larger_numbers(question.num_gpus, question.hardware)][:3]
    if numbers:
        more = replace(freer, num_gpus=numbers[-1])
        first = f"{freed}use {numbers[-1]} GPUs, and "
        yield from _behind(first, fewer_jobs(more, ask), shorter(more, ask))
    if freer.hardware.inter_node is None:
        joined = with_link(freer, profiles)
        yield from _behind(f"{freed}{joined.text}, and ", more_gpus(joined.question, ask))
    for other in roomier(freer, profiles)[-1:]:
        ways = fewer_jobs(other.question, ask), more_gpus(other.question, ask)
        yield from _behind(f"{freed}{other.text}, and ", *ways)


def _behind(first: str, *ways: Iterator[Remedy]) -> Iterator[Remedy]:
    return (replace(remedy, text=f"{first}{remedy.text}") for remedy in chain(*ways))


@dataclass(slots=True)
class _Hunt:
    """Plans for changed questions, and remembers the one that came nearest."""

    _nearest: tuple[float, Question, Dropped] | None = None

    def ask(self, question: Question) -> Plan | None:
        """The first plan that fits; None if none does."""
        drops = Drops()
        # Virtual stages, larger budgets and full micro-batches need more memory, never less.
        vpp_size = question.space.vpp_size or 1
        runs_in = question.space.runs_in or ("train" if vpp_size == 1 else None)
        space = replace(question.space, vpp_size=vpp_size, runs_in=runs_in)
        fit = Fit(replace(question, space=space), drops)
        layouts = fit.layouts.on_all(question.num_gpus)
        plans = chain.from_iterable(fit.plans(layout, most_budgets=1) for layout in layouts)
        plan = next((plan for plan, _ in plans), None)
        if plan is None and (least := drops.least_memory()) is not None:
            over = least[0] / question.hardware.memory_bytes
            if self._nearest is None or over < self._nearest[0]:
                self._nearest = over, question, least[1]
        return plan

    def nearest(self) -> str:
        """The plan of any question that missed the memory by least; empty if none was priced."""
        if self._nearest is None:
            return ""
        _, question, least = self._nearest
        jobs = "1 job" if len(question.jobs) == 1 else f"{len(question.jobs)} jobs"
        longest = max(job.lengths.longest for job in question.jobs)
        return (
            f"{jobs} of sequences of up to {longest:,} tokens on {question.num_gpus} x "
            f"{question.hardware.gpu} came nearest ({least.example.label}): {least.reason}"
        )


def _why_none(question: Question, profiles: Sequence[HardwareProfile], hunt: _Hunt) -> str:
    """Says which changes were tried, and which need came nearest."""
    most = max(larger_numbers(question.num_gpus, question.hardware), default=question.num_gpus)
    tried = ["other choices"]
    tried += ["fewer jobs"] if len(question.jobs) > 1 else []
    tried += [f"sequences cut down to {SHORTEST} tokens", f"up to {most:,} GPUs"]
    tried += [f"the profiles {', '.join(p.name for p in profiles)}"] if profiles else []
    nearest = hunt.nearest() or "no layout of these GPUs suits the model"
    return f"nothing that was tried helps ({'; '.join(tried)}): {nearest}"
