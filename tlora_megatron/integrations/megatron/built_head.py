"""The output layer and the loss of a model that someone else built, over target rows alone.

`GPTModel._postprocess` computes logits of all rows, and their loss in fp32. Where the head is plain
`VocabularyHead` takes the hidden states instead. The model keeps the output layer: its weight is
read at every call, so that loading and tying stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from tlora_megatron.integrations.megatron.layer.conditions import HEAD, why_not_config
from tlora_megatron.integrations.megatron.layer.mixing import built_class, mix
from tlora_megatron.integrations.megatron.layer.module_hooks import (
    does_more,
    hangs_on_all,
    what_hangs_on,
)
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.ops.routing.segments import current_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups


class Targets(NamedTuple):
    """The work that a call of the model does in the place of logits."""

    rows_n: Tensor
    """Rows with a target, int64, ascending."""
    labels_T: Tensor
    scores: bool
    """Losses, and if the label is the first choice, fp32 `[2, T]`; otherwise losses `[1, T]`."""


_TARGETS: ContextVar[Targets | None] = ContextVar("tlora_targets", default=None)


@contextmanager
def use_targets(targets: Targets) -> Iterator[None]:
    """Has a call of the model compute targets."""
    token = _TARGETS.set(targets)
    try:
        yield
    finally:
        _TARGETS.reset(token)


class TargetRowsModel(GPTModel):
    """Mixin of a GPTModel that computes the bound targets, and without any what it always does."""

    tlora_head: VocabularyHead

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        targets = _TARGETS.get()
        if targets is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        rows_n, labels_T, scores = targets
        view = current_micro_batch()
        exactness = None if view is None else view.exactness
        if not scores:
            return self.tlora_head.losses(hidden_states, rows_n, labels_T, exactness)[None]
        losses_T, right_T = self.tlora_head.score(hidden_states, rows_n, labels_T, exactness)
        return torch.stack([losses_T, right_T.float()])


class BuiltHead:
    """The head of a pipeline's last model chunk, which then takes targets.

    Args:
        model: a GPTModel for which `why_not_head` gives None.
        vocab_size: number of tokens; further columns of the logits are padding.
        tell: is told why the head has run by the modules after all.
    """

    def __init__(
        self, model: Any, vocab_size: int, groups: ParallelGroups, tell: Callable[[str], None]
    ) -> None:
        self.agreed: bool | None = None
        """What the tensor-parallel ranks have agreed on (`AgreedParts`); None = this one
        decides."""
        self._model = model
        self._tell = tell
        head = VocabularyHead(_OutputWeight(model), vocab_size, groups)
        object.__setattr__(model, "tlora_head", head)
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
            what = (
                "a hook waits for all modules"
                if hangs_on_all()
                else what_hangs_on(self._model.output_layer)
            )
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
    if not isinstance(model, GPTModel) or not hasattr(GPTModel, "_postprocess"):
        return f"a {built_class(model).__name__} calls its output layer itself"
    kept = (
        (GPTModel, "_postprocess"),
        (LanguageModule, "compute_language_model_loss"),
    )
    for owner, name in kept:
        if getattr(built_class(model), name) is not getattr(owner, name):
            return f"{built_class(model).__name__} has a {name} of its own"
    reason = why_not_config(model.config, HEAD)
    if reason is not None:
        return reason
    return _why_not_output_layer(model)


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
    if getattr(model.config, "fp32_residual_connection", False):
        return "fp32_residual_connection is True: hidden states are not of the weight's dtype"
    return None
