"""Jobs in a service's store, moved from state to state as a controller moves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tlora_megatron.cli.main import main
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import GangSpec
from tlora_megatron.service.store import GangState, Job, JobState, Store


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON that a command has printed."""
    return json.loads(capsys.readouterr().out)


def submit(run_file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[Any]:
    """Submits a file by the command line; returns its jobs."""
    assert main(["submit", str(run_file), "--json", *options]) == 0
    return list(printed(capsys))


def serve_gang(store: Store, home: Home) -> None:
    """Starts a gang, as far as the store knows."""
    spec = GangSpec(
        gang="g1",
        epoch=1,
        base_model={"path": "base"},
        parallel={},
        run={},
        gpus=((0, 0),),
        root=str(home.root),
    )
    store.gangs.add(spec)
    store.gangs.change("g1", 1, GangState.RUNNING)


def start(store: Store, job: str) -> Job:
    """Lets the gang have a job, as a controller does."""
    store.jobs.change(job, JobState.QUEUED)
    with store.transaction():
        store.leases.grant(job, "g1", 1)
        store.jobs.change(job, JobState.STARTING)
        return store.jobs.change(job, JobState.RUNNING, step=3, num_steps=5, loss=0.5)


def finish(store: Store, job: str) -> None:
    """Ends a job that was started."""
    store.jobs.change(job, JobState.FINISHED, release="it has ended", step=5)
