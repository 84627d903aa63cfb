"""CUDA_DEVICE_MAX_CONNECTIONS: one queue as Megatron asks, all of them for nano-batches."""

from __future__ import annotations

import os

import pytest
import torch

from tlora_megatron.parallel.overlap import VARIABLE, set_queues, shown_in_order


@pytest.mark.parametrize(
    ("given", "overlaps", "expected"),
    [
        (None, False, "1"),
        (None, True, "32"),
        ("1", False, "1"),
        ("1", True, "32"),
        ("8", False, "8"),
        ("8", True, "8"),
    ],
)
def test_the_user_decides_but_for_one_queue_under_nano_batches(
    monkeypatch: pytest.MonkeyPatch, given: str | None, overlaps: bool, expected: str
) -> None:
    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    set_queues(overlaps=overlaps)
    assert os.environ[VARIABLE] == expected


def test_a_started_cuda_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    set_queues(overlaps=True)
    assert not caplog.text
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_queues(overlaps=True)
    assert "CUDA started with CUDA_DEVICE_MAX_CONNECTIONS=1, which must be 32" in caplog.text


def test_one_queue_is_shown_once_cuda_has_read_the_true_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started_with = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: started_with.append(os.environ[VARIABLE]))
    monkeypatch.setenv(VARIABLE, "32")
    with shown_in_order():
        assert os.environ[VARIABLE] == "1"
    assert os.environ[VARIABLE] == "32"
    assert started_with == ["32"]
