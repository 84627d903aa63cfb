"""Readings survive being packed for another process; work in the background keeps its errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tlora_megatron.training.data.job_data import JobData
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.run import reading
from tlora_megatron.training.run.reading import Background, Failed, StillReading


def sequence(length: int) -> TokenSequence:
    tokens = np.arange(length, dtype=np.int32) + 7 * length
    return TokenSequence(tokens, tokens % 3 == 1)


def test_packed_readings_are_the_same() -> None:
    train = tuple(map(sequence, (3, 1, 8)))
    data = JobData(train=train, eval=(), num_truncated=2, num_dropped=1)
    whole, failed = reading._unpack(reading._pack([data, Failed("line 3")]))  # type: ignore[misc]
    assert failed == Failed("line 3")
    assert isinstance(whole, JobData)
    assert whole.fingerprint == data.fingerprint
    assert [len(s.tokens) for s in whole.train] == [3, 1, 8]
    assert (whole.eval, whole.num_truncated, whole.num_dropped) == ((), 2, 1)
    assert reading._unpack(reading._pack(Failed("all"))) == Failed("all")


def test_background_work_can_be_waited_for_in_part() -> None:
    go = threading.Event()
    work = Background(go.wait)
    with pytest.raises(StillReading):
        work.result(0.01)
    go.set()
    assert work.result() is True


def test_an_error_of_background_work_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        Background(lambda: 1 // 0).result()
