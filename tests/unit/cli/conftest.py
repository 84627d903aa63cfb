"""Results of a run, and its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

JOB_RESULT = {
    "status": "finished", "reason": None, "steps": 5, "max_steps": 5, "rank": 4, "last_loss": 0.5,
    "eval_loss_before": 2.0, "eval_loss_after": 0.25, "exact_match_before": 0.0,
    "exact_match_after": 0.875, "tokens": 12345, "target_tokens": 1000, "skipped_steps": 0,
    "adapter": "out/jobs/one/adapter",
}  # fmt: skip
RUN_RESULT = {
    "tokens_per_s": 4321.0,
    "world_size": 2,
    "wall_time_s": 12.5,
    "time_s": {"imports": 2.5, "rounds": 10.0},
    "rounds": 9,
    "nano_batches": {"count": 3, "controller": "best", "time_over_one": 0.9131},
}
RESULT = {"run": RUN_RESULT, "jobs": {"one": JOB_RESULT}}


@pytest.fixture(autouse=True)
def _outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TLORA_DEBUG", raising=False)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    path = tmp_path / "run.yaml"
    document = {
        "base_model": {"path": "base"},
        "run": {"output_dir": str(tmp_path / "out")},
        "jobs": [{"name": "one", "data": {"train": "data.jsonl"}, "max_steps": 5}],
    }
    path.write_text(yaml.safe_dump(document))
    return path
