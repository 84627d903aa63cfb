"""Mixes of jobs over bases with routed experts: whose rows fill a micro-batch evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from scripts.bench.step.jobs import ATTENTION, RANKS, Mix, endless_job, sequence
from tlora_megatron.config.job import LoraSpec

EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    ranks: tuple[int, ...]
    expert_ranks: tuple[int, ...] | None
    """Ranks on the experts; None = no adapter is on them."""
    sharing: Literal["none", "outer"] = "none"

    @property
    def targets(self) -> tuple[str, ...]:
        return ATTENTION if self.expert_ranks is None else (*ATTENTION, *EXPERTS)

    @property
    def shown_expert_rank(self) -> str:
        found = self.expert_ranks or ()
        return " ".join(map(str, found if len(set(found)) > 1 else found[:1]))


CASES: Mapping[str, Case] = {
    "attention": Case(ranks=RANKS, expert_ranks=None),
    "experts": Case(ranks=RANKS, expert_ranks=RANKS),
    "experts_eighth": Case(ranks=RANKS, expert_ranks=tuple(max(1, rank // 8) for rank in RANKS)),
    "experts_outer": Case(ranks=RANKS, expert_ranks=RANKS, sharing="outer"),
    "1x16": Case(ranks=(16,), expert_ranks=(16,)),
    "16x16": Case(ranks=(16,) * 16, expert_ranks=(16,) * 16),
    "1x2": Case(ranks=(2,), expert_ranks=(2,)),
    "64x2": Case(ranks=(2,) * 64, expert_ranks=(2,) * 64),
}


def make_mix(name: str, *, tokens: int, micro_batches: int, vocab_size: int) -> Mix:
    """Jobs of equally many rows, whose batches are so many whole micro-batches of `tokens` rows."""
    case = CASES[name]
    jobs = len(case.ranks)
    length = min(512, tokens // jobs)
    batch = tokens * micro_batches // (jobs * length)
    draw = np.random.default_rng(0)
    specs, data = [], []
    for index, rank in enumerate(case.ranks):
        expert_rank = None if case.expert_ranks is None else case.expert_ranks[index]
        lora = LoraSpec(
            rank=rank,
            expert_rank=None if expert_rank == rank else expert_rank,
            expert_sharing=case.sharing,
            target_modules=case.targets,
        )
        specs.append(endless_job(f"job{index}", lora, batch, length, index))
        data.append(tuple(sequence(draw, length, vocab_size, 0.5) for _ in range(batch)))
    return Mix(name=name, specs=tuple(specs), data=tuple(data), target_share=0.5)
