"""Kernels that need no GPU's compiler, in Triton's interpreter.

Triton chooses it when it is imported, so their tests run in a process of their own: one for all,
since starting it takes longer than most of them.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import python

OPS = Path(__file__).parent
ADAMW, FROZEN = OPS / "adamw/test_adamw.py", OPS / "frozen/test_frozen_kernels.py"
SUMS, CODES = OPS / "routing/test_segments.py", OPS / "quantised/test_quant_kernels.py"
EXPERTS = OPS / "experts/test_expert_kernels.py"
FP8, DECODING = OPS / "frozen/test_fp8_kernels.py", OPS / "test_decoding_kernels.py"
GUARD = OPS / "frozen/test_flash4_guard.py"


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of the frozen parts run as they are where there is a GPU.
    files = [ADAMW]
    if not torch.cuda.is_available():
        files += [FROZEN, SUMS, CODES, FP8, EXPERTS, GUARD, DECODING]
    # In some files words select the tests of kernels, in those named after kernels all.
    words = ("-k", "kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *words, *files)
    assert " passed" in said
    assert ADAMW.name not in said, "it was skipped"
