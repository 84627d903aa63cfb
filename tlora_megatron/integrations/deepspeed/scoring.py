"""Makes the output layer compute losses: only rows with a target get logits, and none are kept.

The model calls the layer as before, so that ZeRO-3's hooks gather its weight; while a batch is
being scored it returns losses in the place of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from tlora_megatron.integrations.deepspeed.discover import weight_shape
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.packing.packing import PackedBatch


class _Scoring(NamedTuple):
    """The batch that the running forward scores."""

    batch: PackedBatch
    predict: bool


_current: _Scoring | None = None


@contextmanager
def score(batch: PackedBatch, *, predict: bool = False) -> Iterator[None]:
    """Makes the model called inside return losses `[1, T]` as its logits.

    With `predict`, fp32 `[1, 2, T]`: losses, and 1 where the label is the first choice.
    """
    global _current
    _current = _Scoring(batch, predict)
    try:
        yield
    finally:
        _current = None


class ScoringMixin:
    """Overrides the forward of an output layer."""

    tlora_groups: ParallelGroups
    tlora_vocab_size: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits, or losses while a batch is scored."""
        if _current is None:
            return super().forward(hidden)  # type: ignore[misc]
        batch, predict = _current
        head = VocabularyHead(self, self.tlora_vocab_size, self.tlora_groups)
        rows_n, labels_T = batch.target_rows, batch.labels[0]
        if not predict:
            return head.losses(hidden, rows_n, labels_T, batch.view.exactness)[None]
        losses_T, right_T = head.score(hidden, rows_n, labels_T, batch.view.exactness)
        return torch.stack([losses_T, right_T.float()])[None]


def prepare_output_layer(model: Any, vocab_size: int, groups: ParallelGroups) -> None:
    """Makes the model's output layer able to score, in place; a second call does nothing.

    Raises:
        ValueError: if tensor parallelism cut the vocabulary into unequal parts.
    """
    head: Any = model.get_output_embeddings()
    if isinstance(head, ScoringMixin):
        return
    rows = weight_shape(head)[0]
    if rows == vocab_size:  # whole on every rank
        groups = replace(groups, tp_rank=0, layout=replace(groups.layout, tp_size=1))
    elif rows * groups.layout.tp_size != vocab_size:
        raise ValueError(
            f"the vocabulary must be a multiple of autotp_size {groups.layout.tp_size}, "
            f"got {vocab_size}"
        )
    base: type[nn.Module] = type(head)
    head.__class__ = type(f"Scoring{base.__name__}", (ScoringMixin, base), {"__module__": __name__})
    object.__setattr__(head, "tlora_groups", groups)
    object.__setattr__(head, "tlora_vocab_size", vocab_size)
