"""Which attention runs where, and what FlashAttention-4 is called with; GPUs are in tests/gpu."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tlora_megatron.ops.frozen import flash4
from tlora_megatron.ops.frozen.packed_attention import (
    CumulativeLengths,
    Flash,
    Sight,
    varlen_attention,
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flash4.VARIABLE, raising=False)
    monkeypatch.setattr(flash4, "keep_compiled", lambda: None)
    for function in (flash4.problem_of, flash4.load):
        monkeypatch.setattr(flash4, function.__name__, function.__wrapped__)


def test_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash4.problem_of(torch.device("cpu")) == "no GPU"
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flash4, "is_installed", lambda: False)
    for capability, problem in (((10, 0), "must be 9.x, got 10.0"), ((9, 0), "pip install")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert problem in str(flash4.problem_of(gpu))


def test_an_installation_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash4, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "cannot be imported" in str(flash4.problem_of(torch.device("cuda", 0)))
    assert "torch's attention is used" in caplog.text


def test_others_do_not_find_it_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    (tmp_path / "flash_attn_4-4.1.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.1.dist-info" / "METADATA").write_text("Name: x\nVersion: 4.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    with flash4.hidden():
        with pytest.raises(ImportError):
            importlib.import_module("flash_attn.cute")
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("flash-attn-4")
        assert metadata.version("pytest") == pytest.__version__
        assert flash4.is_installed()
    assert "flash_attn.cute" not in sys.modules
    assert metadata.version("flash-attn-4") == "4.1"
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    with flash4.hidden():  # who has it keeps it
        assert importlib.import_module("flash_attn.cute") is cute


@pytest.mark.parametrize(
    ("rows", "head_dim", "is_exact", "expected"),
    [
        (2048, 128, False, True),
        (2047, 128, False, False),
        (1, 64, True, True),
        (4096, 80, True, False),
    ],
)
def test_small_micro_batches_and_other_heads_stay_with_torch(
    rows: int, head_dim: int, is_exact: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash4, "problem_of", lambda device: None)
    q = torch.empty(rows, 1, head_dim)
    assert flash4.takes(q, is_exact=is_exact) is expected
    monkeypatch.setenv(flash4.VARIABLE, "torch")
    assert not flash4.takes(q, is_exact=is_exact)


def test_what_cannot_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flash4.VARIABLE, "flash4")
    for head_dim, problem in ((128, "got flash4: no GPU"), (80, "one of 64, 96, 128, got 80")):
        with pytest.raises(ValueError, match=problem):
            flash4.takes(torch.empty(9, 1, head_dim), is_exact=False)
    monkeypatch.setenv(flash4.VARIABLE, "fast")
    with pytest.raises(ValueError, match="TLORA_ATTENTION must be torch or flash4, got 'fast'"):
        flash4.forced()


@pytest.mark.parametrize(("window", "expected"), [(None, (None, None)), (24, (23, 0))])
def test_what_the_package_is_called_with(
    window: int | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        calls.append(named)
        return q * 2 + k.sum() + v.sum(), None

    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(flash4, "problem_of", lambda device: None)
    guard = pytest.importorskip("tlora_megatron.ops.frozen.flash4_guard").Guard
    for name in ("search", "tell"):
        monkeypatch.setattr(guard, name, lambda self, *tensors: None)
    begins = torch.tensor([0, 3, 5], dtype=torch.int32)
    lengths = CumulativeLengths(begins, begins, 3, 3, is_exact=True)
    sinks = torch.zeros(2)
    q, k, v = (torch.randn(5, 2, 64) for _ in range(3))
    q.requires_grad_()
    flash = Flash(lengths, 0.5, Sight(window=window, sinks_N=sinks))
    out = varlen_attention(q, k, v, flash)
    torch.testing.assert_close(out, q * 2 + k.sum() + v.sum())
    out.sum().backward()
    torch.testing.assert_close(q.grad, torch.full_like(q, 2))
    (named,) = calls
    for name, value in (
        ("window_size", expected),
        ("learnable_sink", sinks),
        ("deterministic", True),
        ("causal", True),
        ("softmax_scale", 0.5),
        ("max_seqlen_q", 129),
        ("max_seqlen_k", 129),
    ):
        assert named[name] is value or named[name] == value, name
