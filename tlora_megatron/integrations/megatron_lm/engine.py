"""Stand-ins for the optimizer, the schedule and the losses that Megatron-LM's trainer expects.

The trainer adds every iteration's losses up and divides by the iterations of the interval. A job
steps in some iterations and not in others, so that its sum has to be divided by its own steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.built.head import Targets, has_targets, use_targets
from tlora_megatron.integrations.megatron.built.model import cleared, language_models
from tlora_megatron.integrations.megatron.built.own_compute import OwnCompute
from tlora_megatron.integrations.megatron.engine import ONE
from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.layers.vocabulary_head import VocabularyShard, vocab_parallel_argmax
from tlora_megatron.ops.routing import use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.nano.rounds import NanoSettings
from tlora_megatron.training.packing.packing import PackedBatch
from tlora_megatron.training.super_model import StepReport


class JobOptimizer(MegatronOptimizer):
    """Stand-in for the trainer's optimizer, whose step ends the round of the jobs.

    Every job whose global batch is complete steps with its own optimizer. The stand-in holds no
    parameter of the frozen model, so the trainer has nothing to save, load or clip.

    Args:
        end_round: steps the jobs; returns the largest gradient norm and the largest learning rate
            among those that stepped, 0 where none did.
    """

    def __init__(
        self, config: Any, end_round: Callable[[], tuple[float, float]], device: torch.device
    ) -> None:
        nothing = nn.Parameter(torch.zeros(1, device=device))
        super().__init__(torch.optim.SGD([nothing], lr=0.0), config)
        self.is_stub_optimizer = False
        self._end_round = end_round
        self._scale = torch.ones(1, device=device)
        for group in self.optimizer.param_groups:
            group.update(default_config=True, lr_mult=1.0, wd_mult=1.0, max_lr=0.0, min_lr=0.0)

    def step(self) -> tuple[bool, float, None]:
        """Returns Megatron's success, gradient norm, and no count of zero gradients."""
        grad_norm, lr = self._end_round()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return True, grad_norm, None

    def get_loss_scale(self) -> Tensor:
        """Returns 1: a job's loss is weighted where it is computed."""
        return self._scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: a job's gradient lives until its own step, maybe for several rounds."""

    def prepare_grads(self) -> bool:
        """Returns False, for no inf found: each job looks for its own."""
        return False

    def step_with_ready_grads(self) -> bool:
        """Returns True; Megatron's own `step`, which calls it, is not used."""
        return True

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Does nothing: the loaded base has no master weights."""

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns nothing: jobs have checkpoints of their own."""
        return {}

    state_dict = sharded_state_dict

    def load_state_dict(self, state_dict: Any) -> None:
        """Ignores the state: jobs have checkpoints of their own."""


class NoSchedule:
    """Stand-in for the trainer's schedule; leaves the logged learning rate as the jobs set it."""

    num_steps = 0

    def step(self, increment: int = 0) -> None:
        """Counts samples like Megatron's schedule."""
        self.num_steps += increment

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: jobs have checkpoints of their own."""
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Ignores the state."""


ALL_JOBS = "lm loss"
"""Mean over the target tokens of all jobs that stepped."""
_ADVANCED = "advanced iterations"
"""Key under which the trainer counts iterations."""


class IntervalLosses:
    """Losses summed since the last line of the log."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        """Key -> sum and how many were added."""
        self._latest: dict[str, float] = {}

    def add(self, reports: Sequence[StepReport]) -> dict[str, float]:
        """Adds an iteration; returns `loss/NAME` of every job that stepped, and `lm loss`."""
        losses = {f"loss/{report.job.name}": report.outcome.loss for report in reports}
        finite = [report for report in reports if math.isfinite(report.outcome.loss)]
        targets = sum(report.target_tokens for report in finite)
        if targets:
            total = sum(report.outcome.loss * report.target_tokens for report in finite)
            losses = {ALL_JOBS: total / targets} | losses
        for key, loss in losses.items():
            total, count = self._sums.get(key, (0.0, 0))
            self._sums[key] = (total + loss, count + 1)
        self._latest = losses
        return losses

    def correct(self, loss_dict: dict[str, Tensor], totals: dict[str, Any]) -> None:
        """Sets the trainer's sums so that its line shows each key's mean; begins a new interval.

        Args:
            totals: the trainer's sums, changed in place. Keys without a value go: they would show
                as 0, or what they were.
        """
        iterations = totals.get(_ADVANCED, 0) + 1
        for key in [key for key in totals if key == ALL_JOBS or key.startswith("loss/")]:
            del totals[key]
        for key, (total, count) in self._sums.items():
            # Not read from `loss_dict`: that would wait for the device.
            value = total / count * iterations - self._latest.get(key, 0.0)
            device = loss_dict[key].device if key in loss_dict else None
            totals[key] = torch.tensor([value], dtype=torch.float64, device=device)
        self._sums = {}


class MicroBatchFeed:
    """Data iterators for the trainer, which all give the same round's micro-batches.

    Every tensor- and pipeline-parallel rank packs them for itself, so that routing is at hand on
    middle stages too and rides inside what the iterator gives.
    """

    def __init__(self) -> None:
        self._queues: list[deque[PackedBatch]] = []

    def reader(self) -> Iterator[PackedBatch]:
        """Makes one iterator; virtual pipeline stages have one each."""
        queue: deque[PackedBatch] = deque()
        self._queues.append(queue)

        def drain() -> Iterator[PackedBatch]:
            while queue:
                yield queue.popleft()
            raise RuntimeError("a round must have as many micro-batches as the trainer asks for")

        return drain()

    def fill(self, batches: Sequence[PackedBatch]) -> None:
        """Sets the micro-batches that all readers give next."""
        for queue in self._queues:
            queue.clear()
            queue.extend(batches)


class MegatronLmEngine:
    """`training.evaluation.Scorer` over the model that the user's script built.

    The trainer runs the training rounds: it calls `forward_step` for each micro-batch, and
    `take_losses` then returns their losses. Checks and evaluations run in a schedule of our own.

    Args:
        chunks: the trainer's model chunks, wrapped as it holds them.
        vocab_size: number of tokens; further columns of the logits are padding.
        seq_length: rows of a micro-batch over its context-parallel ranks.
        compute: its head computes target rows alone, and tensor-parallel ranks agree on its parts
            before each evaluation; before each training round whoever runs it asks them. None =
            Megatron's modules compute all.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        groups: ParallelGroups,
        *,
        vocab_size: int,
        seq_length: int,
        nano: NanoSettings = NanoSettings(),  # noqa: B008 - frozen
        compute: OwnCompute | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.groups = groups
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self._compute = compute
        self._losses: list[Tensor] = []
        self._models = language_models(chunks)
        self.nano_batches = NanoBatches(chunks, groups, nano)
        for model in self._models:
            # The schedules then leave the loss as it is: jobs are weighted by their own tokens.
            model.config.calculate_per_token_loss = True
            if model.post_process:
                model.output_layer.register_forward_hook(self._mask_padding)

    def forward_step(
        self, batches: Iterator[PackedBatch], model: nn.Module, *_: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        """Megatron's forward step of one micro-batch, in training."""
        batch = next(batches)
        output = self._call(batch, model, self._targets(batch, scores=False), batch.labels)
        return output, partial(self._weighted, batch)

    def take_losses(self) -> list[Tensor]:
        """Returns weighted losses `[T]` of the micro-batches since the last call.

        None on pipeline stages other than the last.
        """
        losses, self._losses = self._losses, []
        return losses

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Runs batches as the trainer's rounds do, before it trains; see `take_losses`."""
        self._run(batches, self.forward_step, forward_only=False)
        return self.take_losses()

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """Scores the batches without gradients; see `Scorer`."""
        with torch.no_grad():
            outs = self._run(batches, self._predict_step, forward_only=True)
        return [(out["losses"], out["right"]) for out in outs]

    def _run(
        self, batches: Sequence[PackedBatch], step: Callable[..., Any], *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        """Runs Megatron's schedule, without what the trainer would add for its own parameters."""
        if self._compute is not None:
            self._compute.parts.begin()
            self._compute.parts.end()
        iterators = [iter(batches) for _ in self.chunks]
        with cleared([self._models[0].config], "timers", "finalize_model_grads_func"):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks,
                num_microbatches=len(batches),
                seq_length=self.seq_length,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _targets(self, batch: PackedBatch, *, scores: bool) -> Targets | None:
        """Returns the head's work; None where the model's own head computes all rows."""
        head = None if self._compute is None else self._compute.head
        if head is None or not head.runs:
            return None
        return Targets(batch.target_rows, batch.labels[0], scores)

    def _call(
        self, batch: PackedBatch, model: nn.Module, targets: Targets | None, labels: Tensor | None
    ) -> Tensor:
        positions = batch.positions(self.groups.device)
        with use_micro_batch(batch.view), use_targets(targets):
            return model(batch.tokens, positions, None, labels=labels)

    def _weighted(self, batch: PackedBatch, losses: Tensor) -> tuple[Any, ...]:
        losses_T = losses.flatten().float() * batch.weights
        self._losses.append(losses_T.detach())
        return losses_T.sum(), ONE, {}

    def _predict_step(
        self, batches: Iterator[PackedBatch], model: nn.Module, *_: Any
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        targets = self._targets(batch, scores=True)
        output = self._call(batch, model, targets, None)
        return output, partial(self._score if targets is None else _scored, batch)

    def _score(self, batch: PackedBatch, logits: Tensor) -> tuple[Any, ...]:
        """Computes losses and right first choices from logits `[1, T, V / tp]`."""
        rows_n = batch.target_rows
        columns = logits.shape[-1]
        first_column = self.groups.tp_rank * columns
        labels_n = batch.labels[0][rows_n] - first_column
        split = self.groups.layout.tp_size > 1
        shard = VocabularyShard(self.groups.tp_group, split, first_column)
        right_T = torch.zeros_like(batch.labels[0], dtype=torch.bool)
        right_T[rows_n] = vocab_parallel_argmax(logits[0][rows_n], shard) == labels_n
        # After the first choice: for fp32 logits the loss is computed in their place.
        losses = self._models[-1].compute_language_model_loss(
            batch.labels, logits.transpose(0, 1).contiguous()
        )
        losses_T = losses.flatten().float() * batch.weights
        return losses_T.sum(), ONE, {"losses": losses_T, "right": right_T}

    def _mask_padding(self, module: nn.Module, args: Any, output: tuple[Tensor, Any]) -> None:
        """Sets logits of the vocabulary's padding to the least value of their dtype."""
        if has_targets():
            return
        logits = output[0]
        columns = logits.shape[-1]
        valid = max(0, min(columns, self.vocab_size - self.groups.tp_rank * columns))
        if valid < columns:
            logits[..., valid:].fill_(torch.finfo(logits.dtype).min)


def _scored(batch: PackedBatch, scores: Tensor) -> tuple[Any, ...]:
    """Takes losses and right first choices from what a head has returned, `[1, T, 2]`."""
    losses_T, right_T = scores[0, :, 0] * batch.weights, scores[0, :, 1] > 0
    return losses_T.sum(), ONE, {"losses": losses_T, "right": right_T}
