"""A job's progress, status and learning rate while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tlora_megatron.config.job import JobSpec, ScheduleSpec
from tlora_megatron.layers.adapter_bank import Adapter
from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, batch_items
from tlora_megatron.training.preference import (
    Reference,
    Scores,
    drawn_pairs,
    named,
    pair_items,
    scored,
    sides_of,
)


def learning_rate(spec: ScheduleSpec, peak: float, step: int, num_steps: int) -> float:
    """Returns the rate of the update after `step` updates (0 for the first) of `num_steps`.

    Warm-up is linear from 0, as `transformers.get_linear_schedule_with_warmup` has it; `min_lr` is
    the value the linear and cosine decays end at.
    """
    warmup = spec.num_warmup_steps(num_steps)
    if step < warmup:
        return peak * step / warmup
    if spec.name == "constant":
        return peak
    done = (step - warmup) / max(1, num_steps - warmup)
    left = 1.0 - done if spec.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.min_lr + (peak - spec.min_lr) * max(0.0, left)


class EvalResult(NamedTuple):
    """Scores over a job's evaluation sequences."""

    loss: float
    """Mean over all target tokens."""
    exact_match: float
    """Share of sequences whose every target token is the model's first choice: what greedy decoding
    gets exactly right. Of pairs the chosen ones count."""
    scores: Scores = {}  # noqa: RUF012
    """Those of pairs (`preference.SCORES`)."""


@dataclass(kw_only=True, slots=True)
class JobState:
    """Progress of one job. `step` counts batches done, `updates` those that moved the adapter."""

    spec: JobSpec
    data: JobData
    plan: BatchPlan
    adapter: Adapter
    step: int = 0
    updates: int = 0
    tokens: int = 0
    target_tokens: int = 0
    nonfinite_in_a_row: int = 0
    status: Literal["running", "finished", "failed", "cancelled"] = "running"
    reason: str | None = None
    last_loss: float | None = None
    eval_before: EvalResult | None = None
    eval_after: EvalResult | None = None
    queue: list[Item] = field(default_factory=list)
    """Sequences of the current batch that have not run yet."""
    loss: Tensor | None = None
    """This rank's part of the current batch's loss, fp32 `[]`."""
    batch_time_s: float = 0.0
    upcoming: tuple[int, list[Item]] | None = None
    """A step and its batch, if that was made ahead."""
    is_held: bool = False
    """Begins no batch for now, though it is active and keeps its slot."""
    reference: Reference | None = None
    """Of a job of pairs; None = they are not scored yet."""
    nll_T: Tensor | None = None
    """`-log p` of rows of clients or of pairs, fp32; 0 in those that another rank runs."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_active(self) -> bool:
        """True while it takes part in rounds."""
        return self.status == "running"

    @property
    def is_done(self) -> bool:
        """True once it has taken all its steps."""
        return self.step >= self.plan.num_steps

    @property
    def is_eval_due(self) -> bool:
        """True if it is to be evaluated behind the step that it has just made."""
        every = self.spec.eval_every_steps
        return self.is_done or (every is not None and self.step % every == 0)

    @property
    def lacks_reference(self) -> bool:
        """True if its pairs are to be scored before its first step."""
        return self.spec.preference is not None and self.reference is None

    @property
    def sequences_to_score(self) -> list[TokenSequence]:
        """The sequences of its next evaluation: those of its reference first, if it has none."""
        pairs = drawn_pairs(self.plan) if self.lacks_reference else []
        return [*sides_of(self.data.train, pairs), *self.data.eval]

    def take_scores(self, losses: Sequence[float], wrong: Sequence[float]) -> EvalResult | None:
        """Takes what an evaluation has found: the reference, if it had none, and the result.

        Args:
            losses: summed over the targets of each of `sequences_to_score`.
            wrong: number of their targets that are not the first choice.

        Returns:
            None for a job without evaluation data.
        """
        count = len(self.data.eval)
        if self.lacks_reference:
            logps = [-loss for loss in losses]
            self.reference = Reference.of(self.data, drawn_pairs(self.plan), logps)
        if not count:
            return None
        losses, wrong = losses[-count:], wrong[-count:]
        if self.spec.preference is None:
            targets = sum(int(s.is_target.sum()) for s in self.data.eval)
            return EvalResult(sum(losses) / targets, sum(w == 0 for w in wrong) / count)
        assert self.reference is not None, "its pairs have been scored"
        items = pair_items(self.data.eval, self.spec.preference, self.reference.eval)
        loss, scores = scored(-torch.tensor(losses, dtype=torch.float64), items)
        exact = sum(w == 0 for w in wrong[::2]) / len(items)
        return EvalResult(float(loss), exact, named(scores))

    @property
    def is_at_end(self) -> bool:
        """True while its last batch has nothing left that waits."""
        return not self.queue and self.step + 1 >= self.plan.num_steps

    @property
    def is_driven(self) -> bool:
        """True if a client asks for its batches and steps (`training.driven`)."""
        return self.spec.driven

    @property
    def is_idle(self) -> bool:
        """True while it has no part in rounds."""
        return self.is_held

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        peak = self.spec.optimizer.lr
        return learning_rate(self.spec.schedule, peak, self.step, self.plan.num_steps)

    @property
    def dropout_key(self) -> int:
        """Key of the current step's dropout masks."""
        return mix_ints(self.spec.seed, self.step)

    def batch(self, step: int | None = None) -> list[TokenSequence]:
        """Sequences of a step's global batch; None = the current one."""
        indices = self.plan.indices(self.step if step is None else step)
        if self.spec.preference is not None:
            return sides_of(self.data.train, indices)
        return [self.data.train[i] for i in indices]

    def items(self, step: int) -> list[Item]:
        """A step's global batch as it is packed."""
        if self.spec.preference is None:
            return batch_items(self.batch(step))
        assert self.reference is not None, f"job {self.name} steps without a reference"
        reference_P2 = self.reference.train[list(self.plan.indices(step))]
        return pair_items(self.batch(step), self.spec.preference, reference_P2)

    def items_ahead(self) -> list[Item]:
        """Sequences of the current batch that wait; if there are none, the next batch's."""
        if self.queue:
            return self.queue
        step = self.step + 1
        if self.upcoming is None or self.upcoming[0] != step:
            self.upcoming = step, self.items(step)
        return self.upcoming[1]

    def begin_batch(self, device: torch.device) -> None:
        """Queues the next global batch unless one is under way, or the job is held."""
        if self.loss is None and not self.is_held:
            ahead, self.upcoming = self.upcoming, None
            is_made = ahead is not None and ahead[0] == self.step
            self.queue = ahead[1] if ahead and is_made else self.items(self.step)
            if self.spec.preference is not None:
                self.nll_T = torch.zeros(sum(item.length for item in self.queue), device=device)
            self.loss = torch.zeros((), device=device)
            self.batch_time_s = 0.0

    def end_batch(self) -> tuple[int, int]:
        """Moves past the current batch; returns its `(tokens, target_tokens)`."""
        sequences = self.batch()
        tokens = sum(len(s.tokens) for s in sequences)
        targets = sum(int(s.is_target.sum()) for s in sequences)
        self.tokens += tokens
        self.target_tokens += targets
        self.step += 1
        self.loss = self.nll_T = None
        return tokens, targets

    def placeholder(self) -> JobState:
        """Returns a stand-in that keeps this failed job's place in the packing to its planned end.

        The others' sequences then meet the same micro-batches and ranks, in the same order, as if
        nothing had happened, and their sums are rounded the same.
        """
        return replace(self)

    COUNTS = ("step", "updates", "tokens", "target_tokens", "nonfinite_in_a_row")
    SAVED = (*COUNTS, "last_loss", "eval_before")
    """Attributes of the progress that a checkpoint keeps, and those of them that are counts."""

    def progress(self) -> dict[str, Any]:
        """Values that a checkpoint keeps; data order and dropout follow from seed and step."""
        before = self.eval_before  # only that of pairs has scores
        kept = before and before[: 2 + bool(before.scores)]
        return {key: getattr(self, key) for key in self.SAVED} | {"eval_before": kept}

    def restore(self, progress: dict[str, Any]) -> None:
        for key in self.SAVED:
            setattr(self, key, progress[key])
        if self.eval_before is not None:
            self.eval_before = EvalResult(*self.eval_before)
