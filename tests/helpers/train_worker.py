"""Trains several configurations one after another in one set of processes.

`train_worker.py CASES.json` with
`[{"config": PATH, "output_dir": DIR, "set": [...], "world_size": N}]`. Starting a process costs
more than training a tiny model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tlora_megatron.config.load import load_config
from tlora_megatron.runtime.controller import train_run
from tlora_megatron.training.listener import SilentListener


def main() -> None:
    """Runs every case; all processes take part in all of them."""
    for case in json.loads(Path(sys.argv[1]).read_text()):
        config = load_config(case["config"], case["set"], case["output_dir"])
        train_run(config, SilentListener())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
