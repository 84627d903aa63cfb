"""The one line about flags that jobs do not follow: what was given, and nothing else."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from tlora_megatron.integrations.megatron_lm import hooks
from tlora_megatron.integrations.megatron_lm.refusals import (
    UNUSED,
    describe_unused,
    switch_off,
)


def test_given_flags_are_named_once_with_a_reason() -> None:
    words = (
        "x.py --lr 1e-4 --bf16 --data-path=a --lr 2e-4 --async-save --sft --optimizer-cpu-offload"
    )
    assert describe_unused(words.split()) == (
        "--lr, --optimizer-cpu-offload (each job has its own optimizer and schedule); "
        "--data-path, --sft (each job names its own data); "
        "--async-save (jobs are saved by this package, and the base never)"
    )


@pytest.mark.parametrize(
    "words", ["", "--bf16 --save out --seq-length 64", "--eval-iters 0", "--eval-iters=0", "lr 1"]
)
def test_nothing_is_said_of_flags_that_work_or_were_not_given(words: str) -> None:
    assert describe_unused(words.split()) is None


def test_the_last_value_counts() -> None:
    assert describe_unused(["--eval-iters", "0", "--eval-iters", "5"]) is not None
    assert describe_unused(["--eval-iters=5", "--eval-iters=0"]) is None


def test_no_flag_stands_twice() -> None:
    flags = [flag for group in UNUSED for flag in group.flags]
    assert len(flags) == len(set(flags))
    assert all(flag.startswith("--") for flag in flags)


def test_what_is_not_used_is_switched_off_where_the_version_has_it() -> None:
    args = argparse.Namespace(lr=None, min_lr=1e-3, sft=True, optimizer_cpu_offload=True)
    switch_off(args)
    expected = {"lr": 0.0, "min_lr": 0.0, "sft": False, "optimizer_cpu_offload": False}
    assert vars(args) == expected


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    base = tmp_path / "release"
    base.mkdir()
    (base / "metadata.json").write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")

    def settled(words: str) -> list[str]:
        caplog.clear()
        args = argparse.Namespace(
            save="out", save_interval=1, hidden_size=32, seq_length=8, max_position_embeddings=8,
            lr=0.1,
            transformer_impl="local", load=str(tmp_path), pretrained_checkpoint=None,
            ckpt_format="torch" if "torch" in words else "torch_dist",
        )  # fmt: skip
        hooks.settle(args, words.split())
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.INFO):
        (line,) = settled("--lr 0.1 --ckpt-format torch")
        assert settled("--bf16") == []
    assert line.startswith("without effect beside --tlora-config: --lr (each job has its own ")
    assert "; --ckpt-format torch (the base in " in line
