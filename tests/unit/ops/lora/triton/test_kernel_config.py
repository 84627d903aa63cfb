"""Block sizes: the committed table is valid, and a lookup picks what the table's rules say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlora_megatron.ops.lora.triton import config as module
from tlora_megatron.ops.lora.triton.config import (
    KernelConfig,
    UpConfig,
    choose_config,
    kernel_config,
)

SIZES = {"rows": 2048, "in_size": 4096, "out_size": 6144}
TABLE = {
    "H100": [
        {"rows": 2048, "out_size": 4096, "up": {"num_warps": 8}},
        {"rows": 2048, "down": {"splits": 4}, "up": {"block_columns": 64}},
        {"down": {"splits": 1, "num_stages": 3}},
    ],
    "H200": [{"down": {"splits": 8}}],
}


def test_an_unknown_gpu_gets_the_defaults() -> None:
    assert kernel_config("Some GPU of tomorrow", 1, 1, 1) == KernelConfig()
    assert choose_config(TABLE, "A100", SIZES) == KernelConfig()


def test_the_first_entry_that_applies_wins_kernel_by_kernel() -> None:
    small = choose_config(TABLE, "NVIDIA H100 80GB HBM3", SIZES)
    assert small.down.splits == 4
    assert small.up == UpConfig(block_columns=64)
    assert small.backward_down == KernelConfig().backward_down
    large = choose_config(TABLE, "NVIDIA H100 80GB HBM3", {**SIZES, "rows": 2049})
    assert (large.down.splits, large.down.num_stages) == (1, 3)
    assert large.up == UpConfig()
    square = choose_config(TABLE, "NVIDIA H100 80GB HBM3", {**SIZES, "out_size": 4096})
    assert (square.down.splits, square.up) == (4, UpConfig(num_warps=8))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dwon": {}}, "tuned.json must name one of .*, got 'dwon'"),
        ({"down": {"split": 1}}, "tuned.json must name one of .*, got 'split'"),
        ({"down": {"splits": 0}}, r"down\.splits must be at least 1, got 0"),
        ({"down": {"block_rows": 96}}, r"down\.block_rows must be a power of two, got 96"),
        ({"up": {"block_rows": 512}}, r"up\.block_rows must divide 256, got 512"),
        (
            {"backward_up": {"split_columns": 100}},
            r"backward_up\.split_columns must be a multiple of 128, got 100",
        ),
    ],
)
def test_a_wrong_entry_is_refused(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_config({"H100": [entry]}, "H100", SIZES)


def test_the_committed_table_is_valid() -> None:
    table = json.loads(Path(module.__file__).with_name("tuned.json").read_text())
    evidence = table.pop("evidence")  # of the choice, beside the entries
    assert all(record["after_us"] < record["before_us"] for record in evidence)
    for name, entries in table.items():
        for entry in entries:
            sizes = {bound: entry.get(bound, 1) for bound in SIZES}
            assert choose_config({name: [entry]}, name, sizes) != KernelConfig(), entry
