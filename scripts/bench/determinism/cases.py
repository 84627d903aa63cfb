"""Base models, layouts and documents of the determinism benchmark."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts.bench.harness.arguments import REPO
from scripts.bench.step.jobs import endless_job, sequence
from tlora_megatron.config.job import HF_TARGETS, JobSpec, LoraSpec, OptimizerSpec, ScheduleSpec
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.data.tokenize import TokenSequence

RANKS = (1, 3, 8, 16, 33, 64, 128)
DROPOUTS = (0.0, 0.05, 0.3)
TARGETS = (
    tuple(HF_TARGETS),
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
        lora = LoraSpec(
            rank=self.rank, alpha=2.0 * self.rank, dropout=self.dropout, target_modules=self.targets
        )
        return endless_job(
            self.name, lora, self.batch_size, max(self.lengths), self.seed,
            optimizer=OptimizerSpec(lr=self.lr), schedule=ScheduleSpec(name="constant"),
            portion_tokens=self.portion_tokens,
        )  # fmt: skip

    def sequences(self, vocab_size: int) -> tuple[TokenSequence, ...]:
        """Random tokens; a third of each sequence's first ones are no targets."""
        draw = np.random.default_rng(self.seed)
        return tuple(sequence(draw, length, vocab_size, 2 / 3) for length in self.lengths)


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
        jobs = {"before": [*map(asdict, self.before)], "after": [*map(asdict, self.after)]}
        path.write_text(json.dumps({"own": asdict(self.own), **jobs, "resume_at": self.resume_at}))


def read_mix(path: Path) -> Mix:
    found = json.loads(path.read_text())
    before, after = (tuple(map(_read_plan, found[when])) for when in ("before", "after"))
    return Mix(_read_plan(found["own"]), before, after, found["resume_at"])


def _read_plan(fields: dict[str, Any]) -> Plan:
    tuples = {name: tuple(fields[name]) for name in ("targets", "lengths")}
    return Plan(**{**fields, **tuples})


def draw_mix(draw: random.Random, *, longest: int, portion_tokens: int, most_steps: int) -> Mix:
    """Draws a mix whose jobs have sequences of up to `longest` rows; one neighbour goes wrong.

    Neighbours have as many portion tokens as the watched job, fewer, or no portions.
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
        name=name, rank=draw.choice(RANKS), dropout=draw.choice(DROPOUTS),
        targets=draw.choice(TARGETS), lengths=lengths, batch_size=batch_size,
        seed=draw.randint(0, 2**31 - 1), lr=lr,
    )  # fmt: skip


MODEL = REPO / "configs/models/llama-3.1-8b.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A base model and the micro-batches that it gets."""

    layers: int
    changes: dict[str, int]
    """Fields in which the shape is not Llama-3.1-8B's."""
    micro_batch_tokens: int
    portion_tokens: int
    longest: int
    """Rows of the longest sequence of a drawn mix."""

    def spec(self, model: Path = MODEL) -> ModelSpec:
        return replace(read_model_spec(model), num_layers=self.layers, **self.changes)

    def mix(self, draw: random.Random, steps: int) -> Mix:
        return draw_mix(
            draw, longest=self.longest, portion_tokens=self.portion_tokens, most_steps=steps
        )


SIZES = {
    "toy": Size(
        layers=2,
        changes={
            "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
            "ffn_size": 96, "vocab_size": 128,
        },
        micro_batch_tokens=384, portion_tokens=96, longest=60,
    ),
    "heads of 64": Size(
        layers=2,
        changes={
            "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64,
            "ffn_size": 2816, "vocab_size": 4096,
        },
        micro_batch_tokens=4096, portion_tokens=1024, longest=900,
    ),
    "heads of 128": Size(
        layers=2,
        changes={
            "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128,
            "ffn_size": 5632, "vocab_size": 4096,
        },
        micro_batch_tokens=8192, portion_tokens=2048, longest=3000,
    ),
    "8b": Size(
        layers=8, changes={}, micro_batch_tokens=8192, portion_tokens=1024, longest=1000
    ),
}  # fmt: skip
"""Both small ones have 16 heads: below nine documents of a micro-batch, attention's own choice of
splits follows from their number. `heads of 128` has documents of both of its classes."""


class Case(NamedTuple):
    """The way in which processes share a run."""

    layout: ParallelLayout
    recompute: Recompute = "none"
    nano_batches: int = 1


CASES = {
    "tp1": Case(ParallelLayout()),
    "tp1 selective": Case(ParallelLayout(), "selective"),
    "tp1 full": Case(ParallelLayout(), "full"),
    "tp2": Case(ParallelLayout(tp_size=2)),
    "tp2 full": Case(ParallelLayout(tp_size=2), "full"),
    "tp2 nano2": Case(ParallelLayout(tp_size=2), nano_batches=2),
    "tp2 s_lora": Case(ParallelLayout(tp_size=2, lora_sharding="s_lora")),
    "tp2+sp s_lora": Case(
        ParallelLayout(tp_size=2, sequence_parallel=True, lora_sharding="s_lora")
    ),
    "pp2": Case(ParallelLayout(pp_size=2)),
    "dp2": Case(ParallelLayout(dp_size=2)),
}


def cases_of(world_size: int) -> list[str]:
    return [name for name, case in CASES.items() if case.layout.world_size == world_size]


DOCUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "32 x 256": ((256,) * 4,) * 8,
    "8 x 1024": ((1024,),) * 8,
    "9 of 148 to 1800": ((300, 1700, 900), (148, 1800, 248), (1048, 1048, 1000)),
    "4 x 2048": ((2048,),) * 4,
    "1 x 8192": ((8192,),),
}
"""Lengths of each job's batch; all together fill a micro-batch of 8,192 rows."""


def timed_jobs(documents: str, tokens: int, dropout: float) -> tuple[Plan, ...]:
    """Jobs of rank 16 on all linears, each a portion, that together fill a micro-batch."""
    scale = tokens / 8192
    return tuple(
        Plan(
            name=f"job{index}", rank=16, dropout=dropout, targets=TARGETS[0],
            lengths=tuple(max(2, round(scale * length)) for length in lengths),
            batch_size=len(lengths), seed=index, lr=1e-4, portion_tokens=tokens,
        )
        for index, lengths in enumerate(DOCUMENTS[documents])
    )  # fmt: skip
