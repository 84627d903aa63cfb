"""Trains several configurations one after another in one set of processes.

`train_worker.py CASES.json` with
`[{"config": PATH, "output_dir": DIR, "set": [...], "report": false}]`. No run writes a report
unless a case asks for one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.helpers.lean import draw_no_reports, keep_imports_from_collector
from tlora_megatron.config.load import load_config
from tlora_megatron.runtime.controller import train_run


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    if not any(case.get("report") for case in cases):
        draw_no_reports()
    for case in cases:
        config = load_config(case["config"], case["set"], case["output_dir"])
        train_run(config)
        keep_imports_from_collector()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
