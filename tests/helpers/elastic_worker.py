"""Real gangs under `tlora_elastic`, in two worker slots, from a process that has all imported.

forked("-m", "tests.helpers.elastic_worker", ROOT)    prints a line of JSON

Prices are those of a machine whose steps take seconds, so that the policy finds the moves worth
their pauses; the gangs' steps take milliseconds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.helpers import forked_children, pacing
from tests.helpers.floor_model import FloorModel
from tests.helpers.gang_driver import quickstart_base, quickstart_jobs
from tests.helpers.live_service import FloorCost
from tests.helpers.moves import fused, moves, stays
from tests.helpers.ruled_service import RuledService
from tlora_megatron.service.control.pricing import Pricing
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.settings import Settings

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
        service.make_moves(documents(), lambda step: pacing.allow(root.parent, step))
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
    pacing.install(folder.parent, STEPS["long"])
    print("RESULT " + json.dumps(serve(folder)))
