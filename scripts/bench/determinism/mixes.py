"""Drawn jobs: one that is watched, and neighbours that come and go beside it.

`draw_mix` asks its source of chance for choices, whole numbers and an order alone, so that a seed's
generator and hypothesis draw from the same space.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlora_megatron.config.job import (
    DataSpec,
    JobSpec,
    LoraSpec,
    OptimizerSpec,
    ScheduleSpec,
)
from tlora_megatron.training.data.tokenize import TokenSequence

RANKS = (1, 3, 8, 16, 33, 64, 128)
DROPOUTS = (0.0, 0.05, 0.3)
TARGETS = (
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("q_proj", "v_proj"),
    ("o_proj", "gate_proj", "up_proj"),
    ("down_proj",),
)
SHARES = (1.0, 0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7)
"""Lengths of sequences, as parts of the longest, give or take a few rows."""
BAD_LR = 1e30
"""The first update makes weights whose products are not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One job of a mix."""

    name: str
    rank: int
    dropout: float
    targets: tuple[str, ...]
    lengths: tuple[int, ...]
    """Rows of each sequence of its data."""
    batch_size: int
    seed: int
    lr: float = 1e-2
    portion_tokens: int | None = None

    def spec(self) -> JobSpec:
        """The job as a configuration has it; it never ends by itself."""
        return JobSpec(
            name=self.name,
            data=DataSpec(train="drawn"),
            lora=LoraSpec(
                rank=self.rank,
                alpha=2.0 * self.rank,
                dropout=self.dropout,
                target_modules=self.targets,
            ),
            batch_size=self.batch_size,
            max_seq_len=max(self.lengths) + 1,
            max_steps=10**6,
            optimizer=OptimizerSpec(lr=self.lr),
            schedule=ScheduleSpec(name="constant"),
            seed=self.seed,
            portion_tokens=self.portion_tokens,
        )

    def sequences(self, vocab_size: int) -> tuple[TokenSequence, ...]:
        """Random tokens; a third of each sequence's first ones are no targets."""
        draw = np.random.default_rng(self.seed)
        return tuple(_sequence(draw, length, vocab_size) for length in self.lengths)


def _sequence(draw: np.random.Generator, length: int, vocab_size: int) -> TokenSequence:
    is_target = np.arange(length + 1) > length // 3
    is_target[0], is_target[-1] = False, True
    return TokenSequence(draw.integers(0, vocab_size, length + 1, dtype=np.int32), is_target)


class Mix(NamedTuple):
    """A watched job and its company before and after the moment at which it is resumed."""

    own: Plan
    before: tuple[Plan, ...]
    after: tuple[Plan, ...]
    resume_at: int
    """Steps of the watched job."""

    def first(self) -> tuple[Plan, ...]:
        """The jobs in slot order before the moment."""
        return self._beside(self.before)

    def second(self) -> tuple[Plan, ...]:
        """The jobs in slot order behind it: another slot, another number of slots."""
        return self._beside(self.after)

    def _beside(self, others: tuple[Plan, ...]) -> tuple[Plan, ...]:
        place = (self.own.seed + len(others)) % (len(others) + 1)
        return (*others[:place], self.own, *others[place:])

    def write(self, path: Path) -> None:
        """Writes it for processes that cannot draw it themselves."""
        jobs = {"before": [*map(asdict, self.before)], "after": [*map(asdict, self.after)]}
        path.write_text(json.dumps({"own": asdict(self.own), **jobs, "resume_at": self.resume_at}))


def read_mix(path: Path) -> Mix:
    """Reads what `Mix.write` wrote."""
    found = json.loads(path.read_text())
    before, after = (tuple(map(_read_plan, found[when])) for when in ("before", "after"))
    return Mix(_read_plan(found["own"]), before, after, found["resume_at"])


def _read_plan(fields: dict[str, Any]) -> Plan:
    tuples = {name: tuple(fields[name]) for name in ("targets", "lengths")}
    return Plan(**{**fields, **tuples})


def draw_mix(draw: random.Random, *, longest: int, portion_tokens: int, most_steps: int) -> Mix:
    """Draws a mix whose jobs have sequences of up to `longest` rows; one neighbour goes wrong.

    Args:
        portion_tokens: of the watched job; neighbours have as many, fewer, or no portions.
    """
    own = replace(_plan(draw, "own", longest), portion_tokens=portion_tokens)
    before = [_plan(draw, f"before {i}", longest) for i in range(draw.randint(2, 4))]
    before[0] = _plan(draw, "wrong", longest, lr=BAD_LR)
    after = [_plan(draw, f"after {i}", longest) for i in range(draw.randint(1, 5))]
    draw.shuffle(before)
    choices = (portion_tokens, portion_tokens // 2, None)
    company = [replace(plan, portion_tokens=draw.choice(choices)) for plan in (*before, *after)]
    cut, resume_at = len(before), draw.randint(1, most_steps - 1)
    return Mix(own, tuple(company[:cut]), tuple(company[cut:]), resume_at)


def _plan(draw: random.Random, name: str, longest: int, lr: float = 1e-2) -> Plan:
    batch_size = draw.choice((1, 2, 4, 6))
    lengths = tuple(
        max(2, min(longest, round(longest * draw.choice(SHARES)) + draw.randint(-9, 9)))
        for _ in range(4 * batch_size)
    )
    return Plan(
        name=name,
        rank=draw.choice(RANKS),
        dropout=draw.choice(DROPOUTS),
        targets=draw.choice(TARGETS),
        lengths=lengths,
        batch_size=batch_size,
        seed=draw.randint(0, 2**31 - 1),
        lr=lr,
    )
