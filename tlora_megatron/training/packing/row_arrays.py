"""Values of a micro-batch's rows on the host, and what clients sent with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.frozen.losses import KINDS, TokenInputs
from tlora_megatron.ops.host_copy import to_device


class SentTokens(NamedTuple):
    """Values that a client sent with the tokens of one sequence, one for every row."""

    targets: np.ndarray
    """The token that each row is to predict; any."""
    weights: np.ndarray
    """fp32, of the rows' cross entropy; where this is 0 there is a log-probability all the same."""
    kind: int = KINDS["cross_entropy"]
    """Number of the loss (`ops.frozen.losses`)."""
    inputs: np.ndarray | None = None
    """fp32 `[4, T]`, the further fields of `TokenInputs`; None for cross entropy."""


class SentBatch(NamedTuple):
    """Rows on the device that report `-log p`, and what clients sent with them."""

    is_sent: Tensor
    """bool `[T]`: the row is a client's, or has a target of a pair."""
    kinds: frozenset[int]
    """Numbers of the losses that its rows have."""
    inputs: TokenInputs | None
    """None if cross entropy is the only loss."""


class RowArrays(NamedTuple):
    """Rows of a micro-batch on the host, and what clients sent with them."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    is_sent: np.ndarray
    """bool `[T]`: see `SentBatch`."""
    kind: np.ndarray
    """int8 `[T]`: number of its loss."""
    inputs: np.ndarray
    """fp32 `[4, T]`."""

    @classmethod
    def zeros(cls, num_tokens: int) -> RowArrays:
        """Rows that are padding."""
        return cls(
            tokens=np.zeros(num_tokens, dtype=np.int64),
            labels=np.zeros(num_tokens, dtype=np.int64),
            weights=np.zeros(num_tokens, dtype=np.float32),
            is_sent=np.zeros(num_tokens, dtype=np.bool_),
            kind=np.zeros(num_tokens, dtype=np.int8),
            inputs=np.zeros((4, num_tokens), dtype=np.float32),
        )

    @classmethod
    def join(cls, parts: Sequence[RowArrays]) -> RowArrays:
        return cls(*(np.concatenate(values, axis=-1) for values in zip(*parts, strict=True)))

    def sent_on_device(self, rows: Tensor, device: torch.device) -> SentBatch | None:
        """Copies what clients sent with the chosen rows; None if no row reports so."""
        if not self.is_sent.any():
            return None
        is_sent_T = to_device(torch.from_numpy(self.is_sent)[rows], device)
        kinds = frozenset(np.unique(self.kind).tolist())
        if kinds <= {KINDS["cross_entropy"]}:
            return SentBatch(is_sent_T, kinds, None)
        kind_T = to_device(torch.from_numpy(self.kind)[rows], device)
        values_4T = to_device(torch.from_numpy(self.inputs)[:, rows], device)
        return SentBatch(is_sent_T, kinds, TokenInputs(kind_T, *values_4T))
