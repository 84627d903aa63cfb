"""DeepSpeed JSON files with a tlora section of one job, read without any process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig, load_deepspeed_config


def section(**job: Any) -> dict[str, Any]:
    return {
        "base_model": {"path": "base"},
        "run": {"output_dir": "out", "micro_batch_tokens": 4096},
        "jobs": [{"name": "a", "data": {"train": "a.jsonl"}, "max_steps": 9} | job],
    }


def load(folder: Path, document: dict[str, Any], **extra: Any) -> DeepSpeedConfig:
    path = folder / "ds.json"
    path.write_text(json.dumps({"tlora": section()} | document))
    return load_deepspeed_config(path, **extra)
