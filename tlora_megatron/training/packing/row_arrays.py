"""The rows of a micro-batch on the host: tokens, labels, weights, and what clients sent with them.

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlora_megatron.ops.frozen.losses import KINDS, TokenInputs, scaled_losses
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
    """Values that clients sent with rows of a micro-batch, on the device."""

    is_sent: Tensor
    """bool `[T]`: the row is a client's."""
    kinds: frozenset[int]
    """Numbers of the losses that its rows have."""
    inputs: TokenInputs | None
    """None if cross entropy is the only loss."""

    def losses(self, nll_T: Tensor, weights_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns losses to differentiate, and values to report: `-log p` of clients' rows.

        Rows of other jobs have the bits of `nll_T * weights_T` in both.
        """
        losses_T = scaled_losses(nll_T, weights_T, self.inputs, self.kinds)
        return losses_T, torch.where(self.is_sent, nll_T, losses_T).detach()


class SentRows(NamedTuple):
    """Values that clients sent with rows of a micro-batch, on the host."""

    is_sent: np.ndarray
    """bool `[T]`."""
    kind: np.ndarray
    """int8 `[T]`."""
    inputs: np.ndarray
    """fp32 `[4, T]`."""

    @classmethod
    def zeros(cls, num_tokens: int) -> SentRows:
        """Rows of which none is a client's."""
        return cls(
            np.zeros(num_tokens, dtype=bool),
            np.zeros(num_tokens, dtype=np.int8),
            np.zeros((4, num_tokens), dtype=np.float32),
        )

    def on_device(self, rows: Tensor, device: torch.device) -> SentBatch:
        """Copies the chosen rows to the device."""
        is_sent_T = to_device(torch.from_numpy(self.is_sent)[rows], device)
        kinds = frozenset(np.unique(self.kind).tolist())
        if kinds <= {KINDS["cross_entropy"]}:
            return SentBatch(is_sent_T, kinds, None)
        kind_T = to_device(torch.from_numpy(self.kind)[rows], device)
        values_4T = to_device(torch.from_numpy(self.inputs)[:, rows], device)
        return SentBatch(is_sent_T, kinds, TokenInputs(kind_T, *values_4T))


class RowArrays(NamedTuple):
    """Rows on the host."""

    tokens: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    sent: SentRows | None = None
    """None = no row is a client's."""

    @classmethod
    def zeros(cls, num_tokens: int, *, sent: bool) -> RowArrays:
        """Rows that are padding; `sent` if some will be a client's."""
        return cls(
            np.zeros(num_tokens, dtype=np.int64),
            np.zeros(num_tokens, dtype=np.int64),
            np.zeros(num_tokens, dtype=np.float32),
            SentRows.zeros(num_tokens) if sent else None,
        )

    def put_sent(self, begin: int, end: int, tokens: SentTokens) -> None:
        """Fills rows with what a client sent."""
        assert self.sent is not None, "made for rows of clients"
        self.labels[begin:end], self.weights[begin:end] = tokens.targets, tokens.weights
        self.sent.is_sent[begin:end] = True
        self.sent.kind[begin:end] = tokens.kind
        if tokens.inputs is not None:
            self.sent.inputs[:, begin:end] = tokens.inputs


def join_rows(parts: Sequence[RowArrays]) -> RowArrays:
    """Joins rows, one part behind the other."""
    tokens, labels, weights, _ = zip(*parts, strict=True)
    joined = RowArrays(np.concatenate(tokens), np.concatenate(labels), np.concatenate(weights))
    if all(part.sent is None for part in parts):
        return joined
    sent = [part.sent or SentRows.zeros(len(part.tokens)) for part in parts]
    rows = (np.concatenate(values, axis=-1) for values in zip(*sent, strict=True))
    return joined._replace(sent=SentRows(*rows))
