"""Real gangs under `tlora_elastic`, in two worker slots, from a process that has all imported.

forked("-m", "tests.helpers.elastic_worker", ROOT)    prints a line of JSON

Prices are those of a machine whose steps take seconds, so that the policy finds the moves worth
their pauses; the gangs' steps take milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.helpers import forked_children
from tests.helpers.floor_model import FloorModel
from tests.helpers.gang_driver import quickstart_base, quickstart_jobs
from tests.helpers.live_service import FloorCost
from tests.helpers.moves import fused, moves, stays
from tests.helpers.ruled_service import RuledService
from tlora_megatron.service.control.pricing import Pricing
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.settings import Settings
from tlora_megatron.training.resident.commands import JobCommands

_FILE = "may_reach"
_HELD_S = 20.0
"""Then comes a round all the same: a gang without rounds would be taken for dead."""
_BUSY_S = 0.2
"""The same while a job is prepared or saved, which goes on between rounds."""
_LOOK_S = 0.02


def allow(root: Path, step: int) -> None:
    """Lets the job train up to this step."""
    file = root / _FILE
    file.with_suffix(".new").write_text(str(step))
    os.replace(file.with_suffix(".new"), file)


def hold_jobs(root: Path, num_steps: int) -> None:
    """Holds jobs of so many steps in all gangs that are forks of this process.

    The first rank waits before a round, and the others wait for it; commands end the wait.
    """
    original = JobCommands._word

    def word(self: JobCommands, source, *, is_idle):  # type: ignore[no-untyped-def]
        begin_s = time.monotonic()
        while source is not None and not is_idle and _is_held(self, root, num_steps, begin_s):
            if source.wait(_LOOK_S):
                break
        return original(self, source, is_idle=is_idle)

    JobCommands._word = word  # type: ignore[method-assign]


def _is_held(commands: JobCommands, root: Path, num_steps: int, begin_s: float) -> bool:
    loop = commands.loop
    steps = [job.step for job in loop.active if job.plan.num_steps == num_steps]
    if not steps or min(steps) < int((root / _FILE).read_text()):
        return False
    is_short = commands.is_preparing or loop.saver.is_busy
    return time.monotonic() - begin_s < (_BUSY_S if is_short else _HELD_S)


GPU_TOKENS = 180
"""The long job is half as fast again on two GPUs as on one; two small ones share one GPU freely."""
STEPS = {"long": 120, "small": 40, "other": 30, "wide": 10}
BATCH = {"long": 6, "small": 2, "other": 2, "wide": 6}


def documents() -> dict[str, dict[str, Any]]:
    (quick,) = quickstart_jobs(["ordered"]).values()
    return {
        name: {
            "name": name,
            "data": {"train": quick["data"]["train"]},
            "lora": {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
            "batch_size": BATCH[name],
            "max_seq_len": 64,
            "max_steps": steps,
            "portion_tokens": 512,
            "optimizer": {"lr": 3.0e-4},
            "seed": steps,
        }
        for name, steps in STEPS.items()
    }


def serve(root: Path) -> dict[str, Any]:
    settings = Settings(decide_in_thread=False, dwell_s=0.0, regroups_per_min=1000)
    engine = LocalEngine(root, 0, slots=2, preforked=1)
    # Steps of a second or more, whatever they take.
    prices = Pricing(lambda section: FloorCost(model=FloorModel(gpu_tokens=GPU_TOKENS)))
    with RuledService(root, engine, prices, quickstart_base(), settings) as service:
        service.make_moves(documents(), lambda step: allow(root.parent, step))
        found = stays(root)
        names = {row.id: row.name for row in service.store.jobs.page()}
        return {
            "ids": {name: job for job, name in names.items()},
            "moves": [asdict(m) | {"job": names[m.job]} for m in moves(found, service.store)],
            "fused": [sorted(names[job] for job in group) for group in sorted(fused(found))],
            "stays": [[names[stay.job], len(stay.gpus), stay.step] for stay in found],
        }


if __name__ == "__main__":
    forked_children.install()
    folder = Path(sys.argv[1])
    hold_jobs(folder.parent, STEPS["long"])
    print("RESULT " + json.dumps(serve(folder)))
