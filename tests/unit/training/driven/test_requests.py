"""Requests of clients: what they may ask, and their rows packed beside those of other jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tlora_megatron.ops.frozen.losses import KINDS
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.driven_jobs import items_of
from tlora_megatron.training.driven_requests import (
    LOSSES,
    AdamParams,
    Request,
    RequestError,
    check_request,
)
from tlora_megatron.training.packing.packing import (
    Item,
    PackedBatch,
    Placed,
    fill_rows,
    pack,
)
from tlora_megatron.training.packing.row_arrays import RowArrays

ARRAYS: dict[str, np.ndarray] = {
    "lengths": np.array([2, 1], np.int32),
    "tokens": np.array([10, 11, 12], np.int32),
    "targets": np.array([70, 0, 72], np.int64),
}
"""Sequences of 2 and 1 tokens, whose targets are not the input shifted."""
NAMES = ("logprobs", "advantages", "sequence_ratio_mask")
EXTRA = {name: np.zeros(3, np.float32) for name in NAMES}
SAMPLED = {name: EXTRA[name] for name in NAMES[:2]}


def request(loss: str = "cross_entropy", config: Any = None, **arrays: np.ndarray) -> Request:
    """A forward-backward of two sequences."""
    params = {"loss_fn": loss, "loss_fn_config": config or {}}
    return Request(op="forward_backward", params=params, arrays=ARRAYS | arrays)


def asked(op: str, **params: Any) -> Request:
    return Request(op=op, params=params)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_takes_what_it_needs(loss: str) -> None:
    arrays = {name: EXTRA[name] for name in LOSSES[loss].needs}
    check_request(request(loss, {"beta": 0.1} if loss == "dro" else None, **arrays))


def test_defaults_are_those_of_the_documentation() -> None:
    clips = ("clip_low_threshold", "clip_high_threshold")
    assert tuple(request("ppo").loss_config()[key] for key in clips) == (0.8, 1.2)
    assert tuple(request("cispo").loss_config()[key] for key in clips) == (0.0, 4.0)
    assert asked("optim_step").adam() == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (asked("jump"), "op must be among forward_backward"),
        (request("custom"), "loss_fn must be among cross_entropy"),
        (request("gspo", **SAMPLED), "gspo must have sequence_ratio_mask for every token"),
        (request("stable_reinforce", {"kl_coeff": 1}, **SAMPLED), "loss_fn_config of stable_r"),
        (replace(request(), params={"runs": [2]}), "runs must be those of data with sequences of"),
        (replace(request(), params={"runs": [1]}), "runs must be those of data with sequences of"),
        (replace(request(), params={"runs": "2"}), "runs must be whole numbers above 0"),
        (request("ppo"), "ppo must have logprobs for every token, got none"),
        (request("dro", **SAMPLED), "loss_fn_config of dro must hold beta"),
        (request("dro", {"beta": -1}, **SAMPLED), "beta must be at least 0"),
        (request("ppo", {"eps": 1}, **SAMPLED), "loss_fn_config of ppo must be among clip_low"),
        (request(config={"beta": 1}), "loss_fn_config of cross_entropy must be left out"),
        (request("ppo", {"clip_low_threshold": 2.0}, **SAMPLED), "clip thresholds must ascend"),
        (request(advantages=SAMPLED["advantages"]), "cross_entropy must take weights beside"),
        (request(weights=np.ones(2, np.float32)), "weights must have one value for each of 3"),
        (request(weights=np.ones((3, 1), np.float32)), "weights must be floats in one dimension"),
        (request(weights=np.array([1, np.nan, 1])), "weights must be finite, got nan at token 1"),
        (request(targets=np.ones((3, 2), np.int64)), "targets must be whole numbers in one dim"),
        (request(lengths=np.array([3, 0], np.int32)), "sequences must hold at least one token"),
        (request(lengths=np.array([], np.int32)), "sequences must hold at least one token"),
        (request(tokens=np.array([5, -6, 7], np.int32)), "tokens must be at least 0"),
        (Request(op="leave", arrays=ARRAYS), "arrays of leave must be left out"),
        (asked("leave", now=True), "parameters of leave must be left out"),
        (asked("optim_step", beta1=1.0), r"beta1 must be in \[0, 1\)"),
        (asked("optim_step", learning_rate="1"), "learning_rate must be a finite number"),
        (asked("optim_step", momentum=0.1), "parameters of optim_step must be among learning"),
        (asked("save_state", name="../x"), "name must be letters"),
        (asked("load_state", path="jobs/j1/states/../../x"), "path must be jobs/ID/states/NAME"),
        (asked("load_state", path="/etc"), "path must be jobs/ID/states/NAME"),
    ],
)
def test_refusals(wrong: Request, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        check_request(wrong)


def test_what_only_the_base_knows() -> None:
    check_request(request(), vocab_size=73, longest=2)
    with pytest.raises(RequestError, match="below 72, the vocabulary, got 72"):
        check_request(request(), vocab_size=72)
    with pytest.raises(RequestError, match="a sequence must have at most 1 tokens here, got 2"):
        check_request(request(), longest=1)


TOKENS = np.array([3, 4, 5, 6], np.int32)


def placed() -> list[Placed]:
    """A job's own sequence, a client's with weights, and one of reinforcement learning."""
    own = Item(TokenSequence(TOKENS, np.array([False, False, True, True])), 0, 0, 0.5)
    weighted = items_of(request(weights=np.array([0, 2, 0.5], np.float32)))
    values = {name: np.arange(3, dtype=np.float32) + 1 for name in ("logprobs", "advantages")}
    clipped = items_of(request("ppo", **values))
    return [
        Placed(0, own),
        *(Placed(1, item) for item in weighted),
        *(Placed(2, item) for item in clipped),
    ]


@pytest.fixture
def batch() -> PackedBatch:
    cpu = torch.device("cpu")
    return pack(
        placed(), num_tokens=16, num_slots=3, dropout_keys=(), cp_rank=0, cp_size=1, device=cpu
    )


def test_every_row_has_what_was_sent_with_it(batch: PackedBatch) -> None:
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


def test_own_rows_keep_their_bits_and_sent_ones_are_told_as_they_are(batch: PackedBatch) -> None:
    nll_T = torch.rand(16, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    losses_T, told_T = batch.losses(nll_T)
    (slope_T,) = torch.autograd.grad(losses_T.sum(), nll_T)
    assert torch.equal(told_T[:3], (nll_T * batch.weights)[:3])
    assert torch.equal(told_T[3:9], nll_T[3:9])
    assert torch.equal(slope_T[:6], batch.weights[:6])


def test_nano_batches_join_with_and_without_clients() -> None:
    items = placed()
    whole = fill_rows(items, 9)
    joined = RowArrays.join([fill_rows(items[:1], 3), fill_rows(items[1:], 6)])
    for one, other in zip(whole, joined, strict=True):
        np.testing.assert_array_equal(one, other)
    own = RowArrays.join([fill_rows(items[:1], 4), fill_rows(items[:1], 4)])
    assert own.sent_on_device(torch.arange(8), torch.device("cpu")) is None
