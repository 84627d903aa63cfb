"""Worker: opens a run over each base, and writes what it was refused for: `WORKER CASES.json OUT`.

CASES has DeepSpeed's JSONs by name. Every rank writes a file `OUT/RANK.json`, with nothing for a
base that was taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tlora_megatron.deepspeed
from tests.helpers.variants import end_world


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    refused = {name: refusal(config) for name, config in cases.items()}
    (Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(refused))
    end_world()


def refusal(config: dict[str, Any]) -> str:
    try:
        engine = tlora_megatron.deepspeed.initialize(config=config)
    except ValueError as error:
        return str(error)
    engine.base.deepspeed.destroy()
    return ""


if __name__ == "__main__":
    main()
