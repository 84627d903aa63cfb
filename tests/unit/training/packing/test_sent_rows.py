"""Rows that clients sent, packed beside rows of jobs with data of their own."""

from __future__ import annotations

import numpy as np
import torch

from tlora_megatron.ops.frozen.losses import KINDS
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.driven_jobs import items_of
from tlora_megatron.training.driven_requests import Request
from tlora_megatron.training.packing.packing import Item, Placed, fill_rows, pack
from tlora_megatron.training.packing.row_arrays import join_rows

TOKENS = np.array([3, 4, 5, 6], np.int32)


def request(loss: str, **more: object) -> Request:
    """Sequences of 2 and 1 tokens, whose targets are not the input shifted."""
    arrays = {
        "lengths": np.array([2, 1], np.int32),
        "tokens": np.array([10, 11, 12], np.int32),
        "targets": np.array([70, 0, 72], np.int64),
    }
    return Request(op="forward_backward", params={"loss_fn": loss}, arrays=arrays | more)  # type: ignore[arg-type]


def placed() -> list[Placed]:
    """A job's own sequence, a client's with weights, and one of reinforcement learning."""
    own = Item(TokenSequence(TOKENS, np.array([False, False, True, True])), 0, 0, 0.5)
    weighted = items_of(request("cross_entropy", weights=np.array([0, 2, 0.5], np.float32)))
    values = {name: np.arange(3, dtype=np.float32) + 1 for name in ("logprobs", "advantages")}
    clipped = items_of(request("ppo", **values))
    return [
        Placed(0, own),
        *(Placed(1, item) for item in weighted),
        *(Placed(2, item) for item in clipped),
    ]


def test_every_row_has_what_was_sent_with_it() -> None:
    cpu = torch.device("cpu")
    batch = pack(
        placed(), num_tokens=16, num_slots=3, dropout_keys=(), cp_rank=0, cp_size=1, device=cpu
    )
    assert batch.tokens[0, :9].tolist() == [3, 4, 5, 10, 11, 12, 10, 11, 12]
    assert batch.labels[0, :9].tolist() == [0, 5, 6, 70, 0, 72, 70, 0, 72]
    assert batch.weights[:9].tolist() == [0, 0.5, 0.5, 0, 2, 0.5, 1, 1, 1]
    # A client is told of all its tokens, of weight 0 and of token 0 too.
    assert batch.target_rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.sent is not None
    assert batch.sent.is_sent.tolist() == [False] * 3 + [True] * 6 + [False] * 7
    assert batch.sent.kinds == {KINDS["cross_entropy"], KINDS["ppo"]}
    inputs = batch.sent.inputs
    assert inputs is not None
    assert inputs.kind_T.tolist() == [0] * 6 + [KINDS["ppo"]] * 3 + [0] * 7
    assert inputs.sampled_T[6:9].tolist() == [1, 2, 3]
    assert inputs.low_T[6:9].tolist() == torch.full((3,), 0.8).tolist()
    assert inputs.high_T[6:9].tolist() == torch.full((3,), 1.2).tolist()


def test_own_rows_keep_their_bits_and_sent_ones_are_told_as_they_are() -> None:
    cpu = torch.device("cpu")
    batch = pack(
        placed(), num_tokens=16, num_slots=3, dropout_keys=(), cp_rank=0, cp_size=1, device=cpu
    )
    assert batch.sent is not None
    nll_T = torch.rand(16, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    losses_T, told_T = batch.sent.losses(nll_T, batch.weights)
    (slope_T,) = torch.autograd.grad(losses_T.sum(), nll_T)
    assert torch.equal(told_T[:3], (nll_T * batch.weights)[:3])
    assert torch.equal(told_T[3:9], nll_T[3:9])
    assert torch.equal(slope_T[:6], batch.weights[:6])


def test_nano_batches_join_with_and_without_clients() -> None:
    items = placed()
    whole = fill_rows(items, 9)
    joined = join_rows([fill_rows(items[:1], 3), fill_rows(items[1:], 6)])
    assert whole.sent is not None
    assert joined.sent is not None
    for one, other in zip((*whole[:3], *whole.sent), (*joined[:3], *joined.sent), strict=True):
        np.testing.assert_array_equal(one, other)
    assert join_rows([fill_rows(items[:1], 4), fill_rows(items[:1], 4)]).sent is None
