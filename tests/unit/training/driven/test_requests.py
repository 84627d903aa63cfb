"""The requests of a client, and the sentences for those it may not make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlora_megatron.training.driven_requests import (
    LOSSES,
    AdamParams,
    Request,
    RequestError,
    check_request,
)

ARRAYS: dict[str, np.ndarray] = {
    "lengths": np.array([2, 1], np.int32),
    "tokens": np.array([5, 6, 7], np.int32),
    "targets": np.array([6, 7, 1], np.int64),
}
SAMPLED = {name: np.zeros(3, np.float32) for name in ("logprobs", "advantages")}


def request(loss: str = "cross_entropy", config: Any = None, **arrays: np.ndarray) -> Request:
    """A forward-backward of two sequences."""
    params = {"loss_fn": loss, "loss_fn_config": config or {}}
    return Request(op="forward_backward", params=params, arrays=ARRAYS | arrays)


def asked(op: str, **params: Any) -> Request:
    """A request without sequences."""
    return Request(op=op, params=params)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_takes_what_it_needs(loss: str) -> None:
    arrays = {name: SAMPLED[name] for name in LOSSES[loss].needs}
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
        (request("gspo"), "loss_fn must be among cross_entropy"),
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
    check_request(request(), vocab_size=8, longest=2)
    with pytest.raises(RequestError, match="below 7, the vocabulary, got 7"):
        check_request(request(), vocab_size=7)
    with pytest.raises(RequestError, match="a sequence must have at most 1 tokens here, got 2"):
        check_request(request(), longest=1)
