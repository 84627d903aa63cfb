"""The search for the kernels' blocks, and the table it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.bench_modules import bench_modules
from tlora_megatron.ops.lora.triton import config as kernel_config


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The modules of scripts/bench."""
    with bench_modules() as modules:
        yield modules


def _winner(bench: SimpleNamespace, **values: Any) -> Any:
    config = kernel_config.DownConfig(splits=4)
    strings = dict.fromkeys(("torch", "triton", "commit", "date"), "a")
    known = {"gpu": "NVIDIA H100 80GB HBM3", "kernel": "down", "bounds": (), "config": config}
    times = {"before_us": 30.0, "after_us": 20.0}
    return bench.load("tuning_table").Winner(**{**strings, **known, **times, **values})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("cpu", "cpu"),
    ],
)
def test_entries_go_under_the_model_of_a_gpu(bench: SimpleNamespace, name: str, key: str) -> None:
    assert bench.load("tuning_table").gpu_key(name) == key
    assert key in name


def test_winners_are_what_the_kernels_look_up(bench: SimpleNamespace, tmp_path: Path) -> None:
    tables = bench.load("tuning_table")
    few = kernel_config.DownConfig(splits=1)
    table = tables.add({}, _winner(bench))
    table = tables.add(table, _winner(bench, bounds=(("rows", 2048),), config=few))
    wide = kernel_config.UpConfig(block_columns=256)
    table = tables.add(table, _winner(bench, kernel="up", config=wide))
    table = tables.add(table, _winner(bench, after_us=10.0))
    path = tmp_path / "tuned.json"
    tables.write(path, table)
    table = tables.read(path)
    for rows, splits in ((2048, 1), (2049, 4)):
        sizes = {"rows": rows, "in_size": 4096, "out_size": 4096}
        found = kernel_config.choose_config(table, "NVIDIA H100 80GB HBM3", sizes)
        assert (found.down.splits, found.up.block_columns) == (splits, 256)
        other = kernel_config.choose_config(table, "NVIDIA B200", sizes)
        assert other == kernel_config.KernelConfig()
    assert [e["after_us"] for e in table["evidence"]] == [20.0, 20.0, 10.0]
    assert tables.read(tmp_path / "absent.json") == {}


def test_blocks_that_do_not_run_leave_valid_evidence(bench: SimpleNamespace) -> None:
    assert _winner(bench, before_us=float("inf")).evidence["before_us"] is None


def test_blocks_are_in_use_for_a_while_only(bench: SimpleNamespace) -> None:
    before = kernel_config.kernel_config("any", 1, 64, 64)
    other = dataclasses.replace(before.down, splits=before.down.splits + 1)
    with bench.load("tuning_table").blocks_in_use(down=other):
        assert kernel_config.kernel_config("any", 1, 64, 64).down == other
    assert kernel_config.kernel_config("any", 1, 64, 64) == before


def test_a_search_finds_the_best_of_each_field(bench: SimpleNamespace) -> None:
    space = bench.load("tuning_space")
    start = kernel_config.DownConfig()

    def time_us(config: Any) -> float:
        return 100.0 + 10 * abs(config.splits - 4) + 10 * (config.num_warps != 8)

    found = list(space.search("down", start, time_us, in_time=lambda: True))
    best = space.best_of(found)
    assert (best.config.splits, best.config.num_warps, best.us) == (4, 8, 100.0)
    assert best.config.block_rows == start.block_rows
    assert len(found) <= space.search_length("down") + len(space.SPACE["down"])
    assert len(list(space.search("down", start, time_us, in_time=lambda: False))) == 1


@pytest.mark.parametrize("kernel", ["down", "up", "backward_up", "backward_down"])
def test_every_kernel_has_valid_neighbours(bench: SimpleNamespace, kernel: str) -> None:
    space = bench.load("tuning_space")
    default = getattr(kernel_config.KernelConfig(), kernel)
    for field in space.SPACE[kernel]:
        assert list(space.neighbours(kernel, default, field))


@pytest.mark.parametrize("dry", [True, False])
def test_tuning_writes_a_table_unless_dry(
    bench: SimpleNamespace, tmp_path: Path, dry: bool
) -> None:
    table, csv = tmp_path / "tuned.json", tmp_path / "tuning.csv"
    options = ["--shapes", "tiny_qkv,tiny_down", "--tokens", "24,48", "--adapters", "2"]
    options += ["--sizes", "80", "--kernels", "up,backward_down", "--device", "cpu"]
    options += ["--table", str(table), "--csv", str(csv), *(["--dry-run"] if dry else [])]
    assert bench.load("tune").main(options) == 0
    assert table.exists() is not dry
    assert csv.read_text().startswith("gpu,torch,triton,commit,kernel,bucket,config,us,ratio")
    if not dry:
        entries = bench.load("tuning_table").read(table)["cpu"]
        bounds = [{k: v for k, v in e.items() if isinstance(v, int)} for e in entries]
        assert {"rows": 24, "in_size": 80} in bounds
        assert bounds[-1] == {}
