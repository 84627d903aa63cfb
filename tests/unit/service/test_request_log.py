"""The request log of a driven job: written once, read by anybody, pruned behind a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.training.driven_requests import Answer, Request, RequestError

STEP = Request(op="optim_step", params={"learning_rate": 1e-3})


def batch(**arrays: object) -> Request:
    """Two sequences of 2 and 1 tokens."""
    found = {
        "lengths": np.array([2, 1], np.int32),
        "tokens": np.array([5, 6, 7], np.int32),
        "targets": np.array([6, 7, 1], np.int64),
        "weights": np.array([0, 1, 0.5], np.float32),
    }
    return Request(op="forward_backward", arrays=found | arrays)  # type: ignore[arg-type]


def test_request_comes_back_as_it_was_written(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "j1")
    assert log.state(1) == "unknown"
    assert log.write_request(1, batch())
    assert log.state(1) == "waiting"
    found = RequestLog(tmp_path / "j1").read_request(1)
    assert (found.op, found.params) == ("forward_backward", {})
    assert {name: array.dtype for name, array in found.arrays.items()} == {
        "lengths": np.int32,
        "tokens": np.int32,
        "targets": np.int64,
        "weights": np.float32,
    }
    np.testing.assert_array_equal(found.arrays["targets"], [6, 7, 1])


def test_answer_keeps_every_bit(tmp_path: Path) -> None:
    log, logprobs = RequestLog(tmp_path), np.array([-1e-7, -0.0, -80.5], np.float32)
    assert log.read_answer(1) is None
    metrics = {"loss:sum": 0.1 + 0.2}
    log.write_answer(1, Answer(metrics=metrics, logprobs=logprobs, values={"step": 3}))
    found = log.read_answer(1)
    assert found is not None
    assert (found.metrics, found.values, found.error) == (metrics, {"step": 3}, None)
    assert found.logprobs is not None
    assert found.logprobs.tobytes() == logprobs.tobytes()


def test_answer_knows_its_sequences_when_their_request_is_gone(tmp_path: Path) -> None:
    log, request = RequestLog(tmp_path), batch()
    log.write_request(1, request)
    logprobs = np.zeros(len(request.arrays["tokens"]), np.float32)
    log.write_answer(1, Answer(logprobs=logprobs))
    log.prune(1)
    found = log.read_answer(1)
    assert found is not None
    assert found.lengths is not None
    np.testing.assert_array_equal(found.lengths, request.arrays["lengths"])
    log.write_answer(7, Answer(error="no", category="user"))
    found = log.read_answer(7)
    assert found is not None
    assert (found.error, found.category, found.logprobs) == ("no", "user", None)


def test_checkpoint_prunes_requests_and_old_answers(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    for number in (1, 2, 3):
        log.write_request(number, STEP)
        log.write_answer(number, Answer())
    os.utime(tmp_path / "answers" / "00000001.safetensors", (0, 0))
    os.utime(tmp_path / "answers" / "00000003.safetensors", (0, 0))
    log.prune(2)
    assert [log.has_request(n) for n in (1, 2, 3)] == [False, False, True]
    assert [log.state(n) for n in (1, 2, 3, 4)] == ["gone", "answered", "answered", "unknown"]
    assert not log.write_request(1, STEP), "it was carried out"
    assert not log.has_request(1)
    assert log.covered() == 2
    log.prune(1)
    assert log.covered() == 2, "never back"


def test_damaged_request_is_a_sentence(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    log.write_request(1, STEP)
    (tmp_path / "requests" / "00000001.safetensors").write_bytes(b"\x10")
    with pytest.raises(RequestError, match="whole file"):
        log.read_request(1)


def test_bad_request_is_refused_where_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="weights must have one value"):
        RequestLog(tmp_path).write_request(1, batch(weights=np.ones(2, np.float32)))
    assert not (tmp_path / "requests").exists()
