"""LoRA shardings on GPUs: all strategies of a small case must agree before the bench times any."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers.launch import torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)], ids=["TP2", "TP2+SP"])
def test_strategies_agree_in_bf16_over_nccl(flags: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    sizes = ("--layers", 1, "--cases", "3x24", "--tokens", 1024, "--rounds", 1, "--steps", 1)
    torchrun("scripts.bench.sharding", 2, *sizes, *flags, "--csv", file)
    rows = {row["strategy"]: row for row in csv.DictReader(file.open())}
    assert rows["s_lora"]["gpu"] != "cpu"
    assert float(rows["s_lora"]["lora_collectives_per_layer"]) == 8
    assert float(rows["block_diagonal"]["lora_collectives_per_layer"]) == 0
