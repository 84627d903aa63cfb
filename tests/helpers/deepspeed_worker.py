"""Trains DeepSpeed configurations one after another in one set of processes.

`deepspeed_worker.py CASES.json` with `[{"config": PATH, "output_dir": DIR, "set": [...]}]`; all
cases of a call have the same tensor-parallel size. With TLORA_TEST_DETERMINISTIC=1 kernels that add
by atomics are avoided where torch has others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tlora_megatron.deepspeed
from tests.helpers.lean import draw_no_reports, keep_imports_from_collector


def main() -> None:
    if os.environ.get("TLORA_TEST_DETERMINISTIC") == "1":
        torch.use_deterministic_algorithms(True, warn_only=True)
    draw_no_reports()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        engine = tlora_megatron.deepspeed.initialize(
            config=case["config"], overrides=case["set"], output_dir=case["output_dir"]
        )
        engine.train()
        keep_imports_from_collector()
        engine.base.deepspeed.destroy()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
