"""The output layer and the loss of a model that someone else built, over target rows alone.

Megatron's models compute logits of all rows, and their loss in fp32. Where the head is plain the
output layer takes the hidden states to `VocabularyHead` instead, and gives losses in the place of
logits; the model hands them through. So all kinds of models have it, whichever method calls their
output layer. They keep that layer: its weight is read at every call, so that loading and tying stay
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from tlora_megatron.integrations.megatron.layer.conditions import HEAD, why_not_config
from tlora_megatron.integrations.megatron.layer.modules import (
    built_class,
    does_more,
    mix,
    what_hangs_on,
)
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.ops.routing import current_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups


class Targets(NamedTuple):
    """The work that a call of the model does in the place of logits."""

    rows_n: Tensor
    """Rows with a target, int64, ascending."""
    labels_T: Tensor
    scores: bool
    """Losses, and if the label is the first choice, fp32 `[1, T, 2]`, of a model that is called
    without labels; otherwise losses `[1, T]`, of one that is called with them."""


_MODELS = ("GPTModel", "HybridModel", "MambaModel")
_LOSS = "compute_language_model_loss"
_TARGETS: ContextVar[Targets | None] = ContextVar("tlora_targets", default=None)


def has_targets() -> bool:
    """True where a call of the model computes targets, not logits."""
    return _TARGETS.get() is not None


@contextmanager
def use_targets(targets: Targets | None) -> Iterator[None]:
    """Has a call of the model compute targets; None = logits, as ever."""
    token = _TARGETS.set(targets)
    try:
        yield
    finally:
        _TARGETS.reset(token)


class TargetRowsLayer(ColumnParallelLinear):
    """Mixin of an output layer that computes the bound targets; without any what it always does."""

    tlora_head: VocabularyHead

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Losses `[T, 1, 1]` (scores `[T, 1, 2]`) of `[T, 1, H]`, in the place of logits."""
        targets = _TARGETS.get()
        if targets is None:
            return super().forward(input_, *args, **kwargs)
        rows_n, labels_T, scores = targets
        view = current_micro_batch()
        exactness = None if view is None else view.exactness
        if not scores:
            losses_T = self.tlora_head.losses(input_, rows_n, labels_T, exactness)
            return losses_T[:, None, None], None
        losses_T, right_T = self.tlora_head.score(input_, rows_n, labels_T, exactness)
        return torch.stack([losses_T, right_T.float()], dim=-1)[:, None], None


class TargetRowsModel(LanguageModule):
    """Mixin of a model whose output layer is a `TargetRowsLayer`."""

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses `[1, T]`, which the output layer has computed if targets are bound."""
        if _TARGETS.get() is None:
            return super().compute_language_model_loss(labels, logits)
        return logits.view(1, -1)


class BuiltHead:
    """The head of a pipeline's last model chunk, which then takes targets.

    Args:
        model: one for which `why_not_head` gives None.
        vocab_size: number of tokens; further columns of the logits are padding.
    """

    def __init__(
        self, model: Any, vocab_size: int, groups: ParallelGroups, tell: Callable[[str], None]
    ) -> None:
        self.agreed: bool | None = None
        """The way that the tensor-parallel ranks have agreed on (`AgreedParts`); None = this one
        decides."""
        self._model = model
        self._tell = tell
        head = VocabularyHead(_OutputWeight(model), vocab_size, groups)
        object.__setattr__(model.output_layer, "tlora_head", head)
        mix(TargetRowsLayer, model.output_layer)
        mix(TargetRowsModel, model)

    @property
    def may_run(self) -> bool:
        """True unless something on this rank waits for the output layer's call now."""
        return not does_more(self._model.output_layer)

    @property
    def runs(self) -> bool:
        """True if the head may run by our kernels now; tells why it may not."""
        runs = self.may_run if self.agreed is None else self.agreed
        if not runs:
            what = what_hangs_on([self._model.output_layer])
            self._tell(what or "something waits for it on another tensor-parallel rank")
        return runs


class _OutputWeight:
    """The output layer's weight, which is the embedding's where they are tied."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def weight(self) -> Tensor:
        model = self._model
        if model.share_embeddings_and_output_weights:
            return model.shared_embedding_or_output_weight()
        return model.output_layer.weight


def why_not_head(model: Any) -> str | None:
    """Returns why a model's own output layer and loss must run; None if target rows are enough."""
    kind = built_class(model)
    for name in ("forward", "_postprocess"):
        owner = _owner(kind, name)
        # Those do nothing with logits but what `conditions.HEAD` lists.
        is_known = owner is None or (
            owner.__module__.startswith("megatron.core.models.") and owner.__name__ in _MODELS
        )
        if not is_known:
            return f"{kind.__name__} has a {name} of its own"
    if _owner(kind, _LOSS) is not LanguageModule:
        return f"{kind.__name__} has a {_LOSS} of its own"
    return why_not_config(model.config, HEAD) or _why_not_output_layer(model)


def _owner(kind: type, name: str) -> type | None:
    return next((c for c in kind.__mro__ if name in vars(c)), None)


def _why_not_output_layer(model: Any) -> str | None:
    layer = model.output_layer
    if built_class(layer) is not ColumnParallelLinear:
        return f"the output layer is a {built_class(layer).__name__}"
    if layer.bias is not None or layer.gather_output:
        return "the output layer has a bias, or gathers all columns"
    if getattr(model, "fp16_lm_cross_entropy", False):
        return "fp16_lm_cross_entropy is True: the loss is not in fp32"
    if getattr(model, "logit_dtype", None) is not None:
        return f"logit_dtype is {model.logit_dtype}: the loss takes rounded logits"
    return None
