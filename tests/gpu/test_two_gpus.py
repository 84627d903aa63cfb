"""Two GPUs: gathers, divided optimizer states, LoRA shardings, nano-batches, a gang's dead rank."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest

from tests.distributed.test_overlap import check, scenario
from tests.helpers import gathers_worker
from tests.helpers.gang_driver import GangDriver, quickstart_base, quickstart_jobs
from tests.helpers.launch import HANG_S, torchrun
from tests.helpers.shard_optimizer_worker import LAYOUTS
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.supervisor import ProcessHandle, ended

pytestmark = pytest.mark.multigpu


def test_gathers_together_are_as_each_by_itself() -> None:
    found = torchrun(gathers_worker.__file__, 2)
    assert "rank 0: all equal" in found
    assert "rank 1: all equal" in found


WORKER = Path(__file__).parents[1] / "helpers" / "shard_optimizer_worker.py"


def test_optimizer_steps_have_the_bits_of_whole_states() -> None:
    log = torchrun(WORKER, 2)
    for name in LAYOUTS[2]:
        assert f"the same bits in {name}" in log


@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)], ids=["TP2", "TP2+SP"])
def test_lora_shardings_agree_in_bf16_over_nccl(flags: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    sizes = ("--layers", 1, "--cases", "3x24", "--tokens", 1024, "--rounds", 1, "--steps", 1)
    torchrun("scripts.bench.sharding", 2, *sizes, *flags, "--csv", file)
    rows = {row["strategy"]: row for row in csv.DictReader(file.open())}
    assert rows["s_lora"]["gpu"] != "cpu"
    assert float(rows["s_lora"]["lora_collectives_per_layer"]) == 8
    assert float(rows["block_diagonal"]["lora_collectives_per_layer"]) == 0


__all__ = ["scenario"]  # a fixture

VARIANTS = (
    "tp=2,dtype=bfloat16,dropout=1",
    "tp=2,sp=1,dtype=bfloat16",
    "tp=2,sp=1,recompute=full,dtype=bfloat16,dropout=1",
    "tp=2,recompute=selective,dtype=bfloat16",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nano_batches_have_losses_and_gradients_of_one(scenario: Path, variant: str) -> None:
    check(scenario, 2, (variant,))


def test_a_rank_does_not_wait_for_a_dead_one_on_its_gpu(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path, 2, preforked=0)
    driver = GangDriver(
        engine,
        tmp_path,
        2,
        base_model=quickstart_base(),
        parallel={"tp_size": 2},
        run={"micro_batch_tokens": 2048},
    )
    long = quickstart_jobs(["sums"], portion_tokens=1024, max_steps=1_000_000)["sums"]
    driver.submit("j1", long)
    driver.start()
    driver.run_until(lambda: len(driver.jobs["j1"].losses) > 20)
    engine.close()
    folder = GangFolder(tmp_path, "g", 1)
    ranks = [ProcessHandle.known_as(folder.pid(rank).read_text()) for rank in range(2)]
    begin_s = time.monotonic()
    ranks[1].kill()
    assert ended(ranks[:1], HANG_S)
    print(f"rank 0 ended {time.monotonic() - begin_s:.1f} s after rank 1")
    assert folder.read_json("end_0.json")["is_lost"]
