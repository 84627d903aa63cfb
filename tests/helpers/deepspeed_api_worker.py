"""Uses the DeepSpeed engine as a program would: `deepspeed_api_worker.py CONFIG OUT`.

Trains the first two jobs of a configuration round by round over a model it has built itself, then
installs the third on the same base.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import tlora_megatron.deepspeed
from tests.helpers.variants import end_world
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import read_config
from tlora_megatron.deepspeed import MultiLoRAEngine


def main() -> None:
    path, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads(path.read_text())
    section = config["tlora"]
    jobs = read_config(section, path.parent).jobs
    model = AutoModelForCausalLM.from_pretrained(section["base_model"]["path"], dtype=torch.float32)
    section["jobs"] = section["jobs"][:2]
    del section["base_model"]
    engine = tlora_megatron.deepspeed.initialize(model, config, output_dir=str(out / "first"))
    seen: dict[str, Any] = {"steps": []}
    while not engine.is_over:
        seen["steps"] += [report.job.name for report in engine.train_round()]
    engine.finish()
    again = AssertionError("the base must stay as it is when jobs are installed")
    with patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=again):
        engine.install_jobs([replace(jobs[2], seed=jobs[2].seed)], output_dir=out / "second")
    while engine.loop.jobs[0].step < 2:
        engine.train_round()
    seen["refused"] = [
        _refusal(engine, wrong) for wrong in ([replace(jobs[2], name="../x")], [jobs[0]] * 2)
    ]
    while engine.loop.jobs[0].step < 3:
        engine.train_round()
    seen["evaluated"] = {name: r.loss for name, r in engine.evaluate().items()}
    engine.export(jobs[2].name, out / "exported")
    too_wide = replace(jobs[2], lora=replace(jobs[2].lora, rank=4096))
    seen["refused"].append(_refusal(engine, [too_wide]))
    seen["left"] = engine.train_round()
    engine.install_jobs([jobs[0], jobs[2]], output_dir=out / "second")
    seen["resumed_at"] = [job.step for job in engine.loop.jobs]
    engine.train()
    if dist.get_rank() == 0:
        (out / "seen.json").write_text(json.dumps(seen))
    end_world()


def _refusal(engine: MultiLoRAEngine, jobs: list[JobSpec]) -> str:
    try:
        engine.install_jobs(jobs)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
