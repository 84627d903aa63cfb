"""Runs packed micro-batches through a Megatron-core GPTModel, in Megatron's pipeline schedules.

A region that is recomputed runs again during some other micro-batch's turn (always so under a
pipeline), when the bound micro-batch is another one or none. So the micro-batch is captured where
the region is checkpointed and restored where it is recomputed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random
from torch import Tensor, nn

from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.integrations.megatron.process_groups import groups_by_size
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.ops.routing import bind_current, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.nano.rounds import NanoSettings
from tlora_megatron.training.packing.packing import PackedBatch

_MARK = "_tlora_captures_routing"


def install() -> None:
    """Wraps Megatron's two checkpointing primitives, once a process.

    Covers `tensor_parallel.checkpoint` (full recompute) and `CheckpointWithoutOutput` (selective)
    at all call sites, and Transformer Engine's checkpoint, which Megatron takes under FP8.
    """
    _install_in_transformer_engine()
    if getattr(random, _MARK, False):
        return
    setattr(random, _MARK, True)
    forward = random.CheckpointFunction.forward

    def bound_forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, bind_current(run_function), *args)

    random.CheckpointFunction.forward = staticmethod(bound_forward)
    checkpoint = random.CheckpointWithoutOutput.checkpoint

    def bound_checkpoint(self: Any, run_function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self, bind_current(run_function), *args, **kwargs)

    random.CheckpointWithoutOutput.checkpoint = bound_checkpoint


def _install_in_transformer_engine() -> None:
    """Wraps the function that `te_checkpoint` imports whenever it is called."""
    try:
        distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    except ImportError:
        return
    if getattr(distributed, _MARK, False):
        return
    setattr(distributed, _MARK, True)
    checkpoint = distributed.checkpoint

    def bound_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(bind_current(function), *args, **kwargs)

    distributed.checkpoint = bound_checkpoint


def pair_linears(model: Any, sites: Sequence[Site]) -> list[tuple[Site, nn.Module]]:
    """Finds each site's module among this rank's decoder layers of a GPTModel."""
    modules = {
        (layer.layer_number - 1, _linear_name(name)): module
        for layer in model.decoder.layers
        for name, module in layer.named_modules()
    }
    return [(site, modules[site.layer, site.linear]) for site in sites]


def _linear_name(name: str) -> str:
    """The name that sites have for a module of a layer."""
    for experts, prefix in (("shared_experts", "shared"), ("experts", "experts")):
        above, _, linear = name.rpartition(f"{experts}.linear_")
        if above:
            return f"{prefix}_{linear}"
    return name.rsplit(".", 1)[-1]


class MegatronEngine:
    """`training.super_model.Engine` over a frozen GPTModel.

    Args:
        vocab_size: number of tokens; further rows of the output layer are padding.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ParallelGroups,
        vocab_size: int,
        nano: NanoSettings = NanoSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.model: Any = model
        self.groups = groups
        self._schedule = get_forward_backward_func()
        self.nano_batches = NanoBatches([model], groups, nano)
        self._head: VocabularyHead | None = None
        if self.model.post_process:
            self._head = VocabularyHead(self.model.output_layer, vocab_size, groups)

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Accumulates gradients in the bank; returns weighted losses; see `Engine`."""
        return [out["losses"] for out in self._run(batches, self._train_step, forward_only=False)]

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """Scores the batches without gradients; see `Scorer`."""
        with torch.no_grad():
            outs = self._run(batches, self._predict_step, forward_only=True)
        return [(out["losses"], out["right"]) for out in outs]

    def _run(
        self, batches: Sequence[PackedBatch], step: Callable[..., Any], *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        if not batches:  # Megatron's schedules run one at least
            return []
        return self._schedule(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=batches[0].view.num_tokens * self.groups.layout.cp_size,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """Output of the stage's layers, `[T, 1, H]`, normed behind the last layer."""
        hidden = None
        with use_micro_batch(batch.view):
            if self.model.pre_process:
                positions = batch.positions(self.groups.device)
                hidden = self.model.embedding(input_ids=batch.tokens, position_ids=positions)
            return self.model.decoder(hidden_states=hidden, attention_mask=None)

    def _train_step(
        self, batches: Iterator[PackedBatch], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        out = self._hidden(batch)
        if self._head is not None:
            rows_n, labels_T = batch.target_rows, batch.labels[0]
            out = self._head.losses(out, rows_n, labels_T, batch.view.exactness)
        return out, partial(self._weighted_loss, batch)

    def _predict_step(
        self, batches: Iterator[PackedBatch], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        return self._hidden(batch), partial(self._score, batch)

    def _score(self, batch: PackedBatch, hidden: Tensor) -> tuple[Any, ...]:
        assert self._head is not None, "only the last stage scores"
        rows_n, labels_T = batch.target_rows, batch.labels[0]
        losses_T, right_T = self._head.score(hidden, rows_n, labels_T, batch.view.exactness)
        if batch.sent is None:
            losses_T = losses_T * batch.weights
        return losses_T.sum(), ONE, {"losses": losses_T, "right": right_T}

    def _weighted_loss(self, batch: PackedBatch, losses: Tensor) -> tuple[Any, ...]:
        add = None
        if batch.pairs is not None and batch.view.cp_size > 1:
            whole = parallel_state.get_context_parallel_group()
            groups = groups_by_size(whole, self.groups.layout.cp_size)
            add = partial(dist.all_reduce, group=groups[batch.view.cp_size])
        losses_T, reported_T = batch.losses(losses.flatten(), add)
        return losses_T.sum(), ONE, {"losses": reported_T}


ONE = torch.tensor(1, dtype=torch.int)
"""Megatron's token count; unused, since `calculate_per_token_loss` scales nothing but gradients of
parameters that a trainer knows, and there are none."""
