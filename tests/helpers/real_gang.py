"""Two jobs of the quickstart through a gang of real ranks on any engine, with a rank killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.gang_driver import GangDriver, quickstart_base
from tests.helpers.gang_worker import LAYOUT, RUN, documents
from tests.helpers.standing_world import forked_result
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.messages import GangFolder


def drive(case: str, root: Path, *args: object) -> dict[str, Any]:
    """Runs a case of `gang_worker` on the local engine, with forks as ranks; returns its result."""
    return forked_result("-m", "tests.helpers.gang_worker", case, root, *args)


def digests(
    engine: GangEngine, root: Path, places: Sequence[tuple[int, int]], *, kill: bool
) -> dict[str, str]:
    """sha256 of the jobs' adapters; losses of steps that are taken again must be the same.

    Args:
        kill: SIGKILLs the second rank when both jobs train.
    """
    driver = GangDriver(
        engine, root, places, base_model=quickstart_base(), parallel=LAYOUT, run=RUN
    )
    for number, document in enumerate(documents(), 1):
        driver.submit(f"j{number}", document, checkpoint_every_steps=3)
    driver.start()
    if kill:
        driver.run_until(lambda: all(len(job.losses) > 2 for job in driver.jobs.values()))
        word = GangFolder(root, "g", driver.epoch).pid(1).read_text()
        os.kill(int(word.split()[0]), signal.SIGKILL)
    driver.run_to_end()
    driver.stop()
    assert [job.ended for job in driver.jobs.values() if job.ended["status"] != "finished"] == []  # type: ignore[index]
    assert len(driver.deaths) == int(kill), driver.deaths
    return driver.adapter_digests()
