"""A service from end to end on the CPU: `tlora serve`, and all commands that use it.

A long job trains when two short ones are submitted; they join it, end, and have the bits that
`tlora train` gives them. The long one is cancelled, and Ctrl-C ends the service.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.helpers.launch import HANG_S, REPO, environment
from tests.helpers.scenario import losses
from tlora_megatron.cli.main import main
from tlora_megatron.config.load import read_config
from tlora_megatron.runtime import controller
from tlora_megatron.service.home import VARIABLE, Home
from tlora_megatron.service.supervisor import ProcessHandle

QUICKSTART = REPO / "configs" / "quickstart"
BASE = {"path": str(QUICKSTART / "base"), "dtype": "float32"}
SHORT = {"mirror": 12, "ordered": 8}
"""Jobs and their steps."""


class Service(NamedTuple):
    """A service that runs."""

    home: Home
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits for something; fails with the service's output."""
        end_s = time.monotonic() + HANG_S
        while not holds():
            assert self.process.poll() is None, f"it ended:\n{self.log.read_text()}"
            assert time.monotonic() < end_s, f"no {what}:\n{self.log.read_text()}"
            time.sleep(0.05)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """`tlora serve` with one seat and a policy that lets all jobs train together."""
    root, log = tmp_path / "service", tmp_path / "serve.log"
    monkeypatch.setenv(VARIABLE, str(root))
    monkeypatch.delenv("RANK", raising=False)
    argv = ["serve", "--gpus=1", "--policy=mlora"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tlora_megatron.cli", *argv],
            env=environment(),
            stdout=out,
            stderr=out,
        )
    try:
        yield Service(Home(root), process, log)
    finally:
        process.kill()
        process.wait()
        for rank in ranks(Home(root)):
            rank.kill()


def ranks(home: Home) -> list[ProcessHandle]:
    """All processes that any gang has had."""
    return [ProcessHandle.known_as(path.read_text()) for path in home.gangs.glob("*/rank_*.pid")]


def job(name: str, steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"train": str(QUICKSTART / "data" / "ordered_train.jsonl")},
        "lora": {"rank": 4, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
        "batch_size": 4,
        "max_seq_len": 64,
        "max_steps": steps,
        "optimizer": {"lr": 5.0e-3},
        "seed": len(name),
    }


def run_of(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"base_model": BASE, "jobs": jobs}


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """All jobs by name, as `tlora jobs --json` lists them."""
    capsys.readouterr()
    assert main(["jobs", "--all", "--json"]) == 0
    return {job["name"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}


def trained_alone(service: Service, ids: dict[str, str], output: Path) -> None:
    """Trains the short jobs as `tlora train` does, with the portions that the service chose."""
    jobs = []
    for name, steps in SHORT.items():
        portion = portion_of(service, ids[name])
        jobs.append(job(name, steps) | {"portion_tokens": portion})
    run = {"output_dir": str(output), "tensorboard": False}
    controller.train_run(read_config(run_of(jobs) | {"run": run}, output))


def portion_of(service: Service, job_id: str) -> int:
    """The portion that the gang was told, which is what counts."""
    lines = [
        line
        for path in service.home.gangs.glob("*/commands.jsonl")
        for line in path.read_text().splitlines()
    ]
    orders = [json.loads(line) for line in lines]
    found = [o["body"] for o in orders if (o["kind"], o["job"]) == ("prepare", job_id)]
    return int(found[0]["document"]["portion_tokens"])


def sha256(adapter: Path) -> str:
    return hashlib.sha256((adapter / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_service_from_its_start_to_its_end(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.wait_until(service.home.store.is_file, "store")
    long_file, short_file = tmp_path / "long.json", tmp_path / "short.yaml"
    long_file.write_text(json.dumps({"base_model": BASE, **job("long", 100_000)}))
    short_file.write_text(yaml.safe_dump(run_of([job(*item) for item in SHORT.items()])))

    assert main(["submit", str(long_file)]) == 0
    service.wait_until(lambda: listed(capsys)["long"]["step"] > 0, "step of the long job")
    assert main(["submit", str(short_file), "--wait"]) == 0, service.log.read_text()

    rows = listed(capsys)
    assert {name: rows[name]["state"] for name in SHORT} == dict.fromkeys(SHORT, "finished")
    assert {name: rows[name]["step"] for name in SHORT} == SHORT
    assert rows["long"]["state"] == "running", "it goes on beside them"
    assert len(list(service.home.gangs.iterdir())) == 1, "all were in one super-model"

    assert main(["cancel", "long"]) == 0
    service.wait_until(lambda: listed(capsys)["long"]["state"] == "cancelled", "cancelling")

    ids = {name: rows[name]["id"] for name in SHORT}
    trained_alone(service, ids, tmp_path / "alone")
    for name in SHORT:
        out = tmp_path / f"{name}-adapter"
        assert main(["adapters", name, "--out", str(out)]) == 0
        assert losses(service.home.root, ids[name]) == losses(tmp_path / "alone", name)
        assert rows[name]["loss"] == losses(tmp_path / "alone", name)[-1]
        assert sha256(out) == sha256(tmp_path / "alone" / "jobs" / name / "adapter")
        base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "base")
        assert PeftModel.from_pretrained(base, out).peft_config["default"].r == 4

    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(HANG_S) == 0, service.log.read_text()
    assert all(rank.is_over for rank in ranks(service.home))
