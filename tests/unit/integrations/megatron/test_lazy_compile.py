"""Decorators of `torch.compile` compile at the first call; a run's start imports no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.launch import HANG_S
from tlora_megatron.integrations.megatron.imports import lazy_compile

START = """
import sys
from pathlib import Path
from tlora_megatron.cli.main import main
assert "torch" not in sys.modules, "the command line imports torch"
from tlora_megatron.integrations.megatron import imports
imports.quieten()
from tlora_megatron.runtime import backbone, controller  # noqa: F401 - what a run imports
backbone.import_backbone()
from tlora_megatron.training.data.tokenize import load_tokenizer
load_tokenizer(Path(sys.argv[1]))
print(sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()))
"""


def test_what_is_decorated_is_compiled_at_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[tuple[str, dict[str, object]]] = []

    def compile_(function, **options):  # type: ignore[no-untyped-def]
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    with lazy_compile():

        @torch.compile
        def one(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def two(x: int) -> int:
            return x + 2

    assert torch.compile is compile_
    assert not compiled
    assert [one(1), one(2), two(1), two(2)] == [2, 3, 3, 4]
    assert compiled == [("one", {}), ("two", {"dynamic": True})]


def test_a_run_starts_without_the_compiler() -> None:
    base = Path(__file__).parents[4] / "configs" / "quickstart" / "base"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START, str(base)],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[]"], done.stderr
