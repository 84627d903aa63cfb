"""Ranks of a gang on GPUs, of which one dies while no service runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.gang_driver import GangDriver, quickstart_base, quickstart_jobs
from tests.helpers.launch import HANG_S
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.supervisor import ProcessHandle, ended

pytestmark = pytest.mark.multigpu


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
