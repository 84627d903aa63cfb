"""The first words of a step's process: takes its slot on its node and becomes a rank.

python -m tlora_megatron.service.engines.slurm_task FOLDER SLOTS COMMAND...
python -m tlora_megatron.service.engines.slurm_task look SLOTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tlora_megatron.service.engines.protocol import WorkerSlots
from tlora_megatron.service.messages import GangFolder


def main(argv: list[str]) -> None:
    """Becomes the rank of its number in the step; or prints what a step sees of its node."""
    place, slots, *command = argv
    here = WorkerSlots.of_host(None, int(slots) or None)
    if place == "look":
        name, count = os.environ["SLURMD_NODENAME"], len(here.devices)
        print(json.dumps({"node": name, "gpus": count, "places": here.count}))
        return
    rank = int(os.environ["SLURM_PROCID"])
    _, slot = GangFolder.at(Path(place)).spec().gpus[rank]
    environment = {**os.environ, **here.environment(slot)}
    os.execvpe(command[0], [*command, place, str(rank)], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
