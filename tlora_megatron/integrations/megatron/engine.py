"""Runs packed micro-batches through a Megatron-core GPTModel, in Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import nn

from tlora_megatron.layers.sites import Site
from tlora_megatron.ops.segments import use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.plan import ParallelLayout
from tlora_megatron.training.packing import PackedBatch


def current_groups(layout: ParallelLayout) -> ParallelGroups:
    """This process's place in Megatron's initialised parallel state."""
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return ParallelGroups(
        layout=layout,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        model_group=parallel_state.get_model_parallel_group(),
        device=device,
    )


def pair_linears(model: Any, sites: Sequence[Site]) -> list[tuple[Site, nn.Module]]:
    """Finds each site's module among this rank's decoder layers of a GPTModel."""
    modules = {
        (layer.layer_number - 1, name.rsplit(".", 1)[-1]): module
        for layer in model.decoder.layers
        for name, module in layer.named_modules()
    }
    return [(site, modules[site.layer, site.linear]) for site in sites]


class MegatronEngine:
    """`training.super_model.Engine` over a frozen GPTModel."""

    def __init__(self, model: nn.Module, groups: ParallelGroups) -> None:
        self.model = model
        self.groups = groups
        self._schedule = get_forward_backward_func()

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """See `Engine.forward_backward`."""
        return [out["losses"] for out in self._run(batches, self._train_step, forward_only=False)]

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See `Engine.predict`."""
        with torch.no_grad():
            outs = self._run(batches, self._predict_step, forward_only=True)
        return [(out["losses"], out["right"]) for out in outs]

    def _run(
        self, batches: Sequence[PackedBatch], step: Callable[..., Any], *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        return self._schedule(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=batches[0].view.num_tokens * self.groups.layout.cp_size,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, batch: PackedBatch, **kwargs: Any) -> torch.Tensor:
        positions = batch.view.positions(self.groups.device).unsqueeze(0)
        with use_micro_batch(batch.view):
            return self.model(batch.tokens, positions, None, **kwargs)

    def _train_step(
        self, batches: Iterator[PackedBatch], model: nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        return self._forward(batch, labels=batch.labels), partial(_weighted_loss, batch.weights)

    def _predict_step(
        self, batches: Iterator[PackedBatch], model: nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        return self._forward(batch), partial(self._score, batch)

    def _score(self, batch: PackedBatch, logits_BTV: torch.Tensor) -> tuple[Any, ...]:
        logits_TV, labels_T = logits_BTV[0], batch.labels[0]
        first_T = vocab_parallel_argmax(logits_TV, self.groups.tp_group)
        losses_T = vocab_parallel_cross_entropy(
            logits_TV.unsqueeze(1).float(), labels_T.unsqueeze(1)
        )
        losses_T = losses_T.flatten() * batch.weights
        return losses_T.sum(), _ONE, {"losses": losses_T, "right": first_T == labels_T}


_ONE = torch.tensor(1, dtype=torch.int)
"""Megatron's token count; unused: `calculate_per_token_loss` without a finalizer scales nothing."""


def _weighted_loss(weights_T: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    losses_T = losses.flatten() * weights_T
    return losses_T.sum(), _ONE, {"losses": losses_T.detach()}


def vocab_parallel_argmax(logits_TV: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Token id of the largest logit of every row, the smallest id on a tie, int64 `[T]`.

    Layout in: `[T, V / tp]`, this rank's part of the vocabulary. Collectives: two all-reduces of
    `[T]`.
    """
    best_T, index_T = logits_TV.max(dim=-1)
    best_T = best_T.float()
    top_T = best_T.clone()
    dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
    index_T = index_T + dist.get_rank(group) * logits_TV.shape[1]
    none = torch.iinfo(torch.int64).max
    index_T = torch.where(best_T == top_T, index_T, none)
    dist.all_reduce(index_T, op=dist.ReduceOp.MIN, group=group)
    return index_T
