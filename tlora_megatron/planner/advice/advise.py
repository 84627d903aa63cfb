"""Says what would make a plan fit where none does, or why nothing that can be changed helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.advice.remedies import (
    FREE,
    SHORTEST,
    Ask,
    Question,
    Remedy,
    fewer_jobs,
    larger_numbers,
    more_gpus,
    one_node,
    other_choices,
    other_machines,
    roomier,
    shorter,
    with_link,
)
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.drops import Dropped, Drops
from tlora_megatron.planner.fit import fitting_plans
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.space import SearchSpace
from tlora_megatron.planner.workload import JobLoad


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
        return f"What would fit: {'; or '.join(map(str, self.remedies))}"


def advise(
    spec: ModelSpec,
    jobs: Sequence[JobLoad],
    hardware: HardwareProfile,
    num_gpus: int,
    space: SearchSpace | None = None,
    profiles: Sequence[HardwareProfile] = (),
) -> Advice:
    """Looks for changes that make a plan fit; each one has been planned with.

    Where no single change is enough, two together are tried.

    Args:
        profiles: other machines that may be proposed.

    Raises:
        ValueError: as `search` does.
    """
    question = Question(
        spec=spec,
        jobs=tuple(jobs),
        hardware=hardware,
        num_gpus=num_gpus,
        space=space or SearchSpace(),
    )
    hunt, machines = _Hunt(), tuple(profiles)
    found = tuple(_single(question, hunt.ask, machines)) or tuple(
        _pairs(question, hunt.ask, machines)
    )
    return Advice(found, "" if found else _why_none(question, machines, hunt))


def _single(
    question: Question, ask: Ask, profiles: tuple[HardwareProfile, ...]
) -> Iterator[Remedy]:
    """The smallest change of each kind that is enough, the cheapest kind first."""
    return chain(
        other_choices(question, ask),
        fewer_jobs(question, ask),
        shorter(question, ask),
        one_node(question, ask, profiles),
        more_gpus(question, ask, profiles),
        other_machines(question, ask, profiles),
    )


def _pairs(question: Question, ask: Ask, profiles: tuple[HardwareProfile, ...]) -> Iterator[Remedy]:
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
    joined = with_link(freer, profiles)
    if joined is not None:
        yield from _behind(f"{freed}{joined.text}, and ", more_gpus(joined.question, ask))
    for other in roomier(freer, profiles)[-1:]:
        ways = fewer_jobs(other.question, ask), more_gpus(other.question, ask)
        yield from _behind(f"{freed}{other.text}, and ", *ways)


def _behind(first: str, *ways: Iterator[Remedy]) -> Iterator[Remedy]:
    return (replace(remedy, text=f"{first}{remedy.text}") for remedy in chain(*ways))


@dataclass(slots=True)
class _Hunt:
    """Plans for changed questions, and remembers the one that came nearest."""

    _nearest: tuple[float, Question, Dropped] | None = field(default=None)

    def ask(self, question: Question) -> Plan | None:
        """The first plan that fits; None if none does."""
        drops = Drops()
        # Virtual stages, larger budgets and full micro-batches need more memory, never less.
        vpp_size = question.space.vpp_size or 1
        runs_in = question.space.runs_in or ("train" if vpp_size == 1 else None)
        space = replace(question.space, vpp_size=vpp_size, runs_in=runs_in)
        plans = fitting_plans(
            question.spec,
            question.jobs,
            question.hardware,
            question.num_gpus,
            space,
            drops,
            most_budgets=1,
        )
        plan = next((plan for plan, _ in plans), None)
        if plan is None:
            self._note(question, drops)
        return plan

    def _note(self, question: Question, drops: Drops) -> None:
        least = drops.least_memory()
        if least is None:
            return
        over = least[0] / question.hardware.memory_bytes
        if self._nearest is None or over < self._nearest[0]:
            self._nearest = over, question, least[1]

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
