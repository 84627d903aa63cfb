"""The oldest supported DeepSpeed trains, too: the tests beside this one run with the newest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import WORKER, run_cases, write_config, zero
from tests.helpers.launch import torchrun
from tests.helpers.scenario import losses, make_scenario
from tlora_megatron.integrations.deepspeed.known_keys import OLDEST

_FOLDER = os.environ.get("TLORA_OLDEST_DEEPSPEED", "")
_VERSION = ".".join(map(str, OLDEST))


@pytest.mark.skipif(
    not Path(_FOLDER).is_absolute(),
    reason=f"needs TLORA_OLDEST_DEEPSPEED to name a folder filled by `pip install --no-deps "
    f"--target FOLDER deepspeed=={_VERSION}`",
)
def test_the_oldest_release_gives_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = json.loads(make_scenario(tmp_path).read_text())
    for job in section["jobs"]:
        job["max_steps"] = 6
    cases = []
    for stage in (0, 1, 2, 3):
        config = write_config(tmp_path / f"{stage}.json", zero(stage), section)
        cases.append({"config": str(config), "output_dir": str(tmp_path / f"{stage}"), "set": ()})
    run_cases(2, cases, tmp_path / "cases.json")
    newest = {job["name"]: losses(tmp_path / "0", job["name"]) for job in section["jobs"]}
    for case in cases:
        case["output_dir"] += " oldest"
    monkeypatch.setenv("PYTHONPATH", _FOLDER)
    # Real processes: the forked ones have imported the newest.
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    log = torchrun(WORKER, 2, tmp_path / "cases.json")
    assert "Traceback" not in log
    for case in cases:
        for name, expected in newest.items():
            assert losses(Path(str(case["output_dir"])), name) == pytest.approx(expected, rel=1e-5)
    refused = write_config(tmp_path / "tp.json", {"tensor_parallel": {"autotp_size": 2}}, section)
    entry = {"config": str(refused), "output_dir": str(tmp_path / "tp"), "set": ()}
    (tmp_path / "cases.json").write_text(json.dumps([entry]))
    with pytest.raises(AssertionError, match=f"under AutoTP must be .* got {_VERSION}"):
        torchrun(WORKER, 2, tmp_path / "cases.json")
