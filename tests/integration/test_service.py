"""A service from end to end on the CPU: `tlora serve`, and all commands that use it.

A long job trains when two short ones are submitted; they join it, end, and have the bits that
`tlora train` gives them. The long one is cancelled, and Ctrl-C ends the service.
"""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.helpers.commands import Tlora
from tests.helpers.gang_driver import digest
from tests.helpers.launch import HANG_S, REPO
from tests.helpers.scenario import losses
from tests.helpers.served_http import Served, serving
from tlora_megatron.config.load import read_config
from tlora_megatron.runtime import controller
from tlora_megatron.service.home import VARIABLE, Home

QUICKSTART = REPO / "configs" / "quickstart"
BASE = {"path": str(QUICKSTART / "base"), "dtype": "float32"}
SHORT = {"mirror": 12, "ordered": 8}
"""Jobs and their steps."""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A service that commands find by the environment."""
    root = tmp_path / "service"
    monkeypatch.setenv(VARIABLE, str(root))
    monkeypatch.delenv("RANK", raising=False)
    with serving(root, tmp_path / "serve.log") as served:
        yield served


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


def trial(name: str, lr: float) -> dict[str, Any]:
    """A trial of `sweep_beside` as a job of its own."""
    own = job("rates", 8)
    data = own["data"] | {"eval": str(QUICKSTART / "data" / "ordered_eval.jsonl")}
    return own | {"name": name, "data": data, "optimizer": {"lr": lr}}


def sweep_beside(service: Served, folder: Path, tlora: Tlora) -> dict[str, dict[str, Any]]:
    """Runs a sweep beside the long job; returns the trial that finishes, by its name."""
    file = folder / "sweep.yaml"
    sweep = {"over": {"optimizer.lr": [1e-5, 5e-3, 1e-4]}, "stop": {"keep": 0.3, "at": [0.5]}}
    document = {"base_model": BASE, "job": trial("rates", 1e-3), "sweep": sweep}
    file.write_text(json.dumps(document))
    assert "rates: 3 trials" in tlora("sweep", file, "--service", service.home.root)

    def trials() -> list[dict[str, Any]]:
        return list(tlora.json("jobs", "--group", "rates")["ranking"])

    over = ("finished", "cancelled", "failed")
    service.wait_until(lambda: all(row["status"] in over for row in trials()), "end of the sweep")
    rows = trials()
    assert [row["status"] for row in rows] == ["finished", "cancelled", "cancelled"]
    assert all(row["reason"].startswith("stopped at step 4: ") for row in rows[1:])
    assert "1 of 1 rungs decided; best rates-1 (optimizer.lr 0.005" in tlora("jobs", "--group")
    return {rows[0]["trial"]: rows[0]}


def listed(tlora: Tlora) -> dict[str, dict[str, Any]]:
    return {job["name"]: job for job in tlora.json("jobs", "--all")["jobs"]}


def trained_alone(service: Served, ids: dict[str, str], output: Path) -> None:
    """Trains the short jobs as `tlora train` does, with the portions that the service chose."""
    jobs = []
    for name, steps in SHORT.items():
        portion = portion_of(service, ids[name])
        jobs.append(job(name, steps) | {"portion_tokens": portion})
    run = {"output_dir": str(output), "tensorboard": False}
    controller.train_run(read_config(run_of(jobs) | {"run": run}, output))


def copied(home: Home, to: Path) -> Home:
    """Copies a service that runs, as docs/operations.md says: its store, then its folders."""
    to.mkdir(mode=0o700)
    copy = Home(to)
    with closing(sqlite3.connect(home.store)) as store, closing(sqlite3.connect(copy.store)) as new:
        store.backup(new)
    shutil.copytree(
        home.root, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("store.sqlite*")
    )
    return copy


def portion_of(service: Served, job_id: str) -> int:
    """The portion that the gang was told, which is what counts."""
    lines = [
        line
        for path in service.home.gangs.glob("*/commands.jsonl")
        for line in path.read_text().splitlines()
    ]
    orders = [json.loads(line) for line in lines]
    found = [o["body"] for o in orders if (o["kind"], o["job"]) == ("prepare", job_id)]
    return int(found[0]["document"]["portion_tokens"])


@pytest.mark.slow
def test_a_service_from_its_start_to_its_end(
    service: Served, tmp_path: Path, tlora: Tlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.wait_until(service.home.store.is_file, "store")
    long_file, short_file = tmp_path / "long.json", tmp_path / "short.yaml"
    long_file.write_text(json.dumps({"base_model": BASE, **job("long", 100_000)}))
    short_file.write_text(yaml.safe_dump(run_of([job(*item) for item in SHORT.items()])))

    tlora("submit", long_file)
    service.wait_until(lambda: listed(tlora)["long"]["step"] > 0, "step of the long job")
    tlora("submit", short_file, "--wait")

    rows = listed(tlora)
    assert {name: rows[name]["state"] for name in SHORT} == dict.fromkeys(SHORT, "finished")
    assert {name: rows[name]["step"] for name in SHORT} == SHORT
    assert rows["long"]["state"] == "running", "it goes on beside them"
    assert len(list(service.home.gangs.iterdir())) == 1, "all were in one super-model"
    copy = copied(service.home, tmp_path / "copy")

    trials = sweep_beside(service, tmp_path, tlora)

    tlora("cancel", "long")
    service.wait_until(lambda: listed(tlora)["long"]["state"] == "cancelled", "cancelling")

    ids = {name: rows[name]["id"] for name in SHORT}
    trained_alone(service, ids, tmp_path / "alone")
    (best,) = trials
    tlora("adapters", "rates", "--best", "--out", tmp_path / "best")
    portion = portion_of(service, trials[best]["job"])
    alone = trial(best, trials[best]["settings"]["optimizer.lr"]) | {"portion_tokens": portion}
    run = {"output_dir": str(tmp_path / "trial"), "tensorboard": False}
    controller.train_run(read_config(run_of([alone]) | {"run": run}, tmp_path))
    mine = tmp_path / "trial" / "jobs" / best / "adapter"
    adapters = (tmp_path / "best", mine)
    assert len({digest(path / "adapter_model.safetensors") for path in adapters}) == 1

    for name in SHORT:
        out = tmp_path / f"{name}-adapter"
        tlora("adapters", name, "--out", out)
        assert losses(service.home.root, ids[name]) == losses(tmp_path / "alone", name)
        assert rows[name]["loss"] == losses(tmp_path / "alone", name)[-1]
        adapters = (out, tmp_path / "alone" / "jobs" / name / "adapter")
        assert len({digest(path / "adapter_model.safetensors") for path in adapters}) == 1
        base = AutoModelForCausalLM.from_pretrained(QUICKSTART / "base")
        assert PeftModel.from_pretrained(base, out).peft_config["default"].r == 4

    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(HANG_S) == 0, service.log.read_text()
    assert all(rank.is_over for rank in service.ranks())

    monkeypatch.setenv(VARIABLE, str(copy.root))
    name = rows["long"]["id"]
    steps = len(losses(copy.root, name))
    with serving(copy.root, tmp_path / "copy.log") as restored:
        restored.wait_until(lambda: len(losses(copy.root, name)) > steps, "step behind the copy")
    assert listed(tlora)["long"]["state"] == "running"
    assert {listed(tlora)[short]["state"] for short in SHORT} == {"finished"}
