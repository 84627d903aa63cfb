"""Jobs in a service's store, moved from state to state as a controller moves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.helpers.launch import REPO
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.messages import GangSpec
from tlora_megatron.service.prepare.submission import Submission, split_submissions
from tlora_megatron.service.store import GangState, Job, JobState, NewJob, Store


def put_job(store: Store, name: str = "a", tenant: str = "ann", **fields: Any) -> str:
    """Submits a job of a tenant; returns its id."""
    row = {"name": name, "document": {"name": name}, "base": "b", "key": name, **fields}
    return store.jobs.submit([NewJob(**row)], tenant=tenant)[0].id


def submit_all(store: Store, document: Mapping[str, Any], folder: Path = REPO) -> None:
    """Submits the jobs of a run's document together; each may have a section `service`."""
    found = split_submissions(document, folder).submissions
    store.jobs.submit(
        [
            NewJob(
                name=one.name,
                document=one.row(),
                base=one.base_key,
                key=one.name,
                schedule=asdict(one.job_spec().service),
            )
            for one in found
        ]
    )


class ValidatorHere:
    """Reads the data of jobs in this process, as soon as they come."""

    def __init__(self, read: Callable[[str, Submission], Any]) -> None:
        self._read = read
        self._done: list[Any] = []

    def submit(self, job_id: str, submission: Submission, priority: int = 0) -> None:
        self._done.append(self._read(job_id, submission))

    def forget(self, jobs: Collection[str]) -> None:
        self._done = [outcome for outcome in self._done if outcome.job not in jobs]

    def poll(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def close(self) -> None: ...


def write_steps(home: Home, job: str, *rows: Mapping[str, Any], torn: str = "") -> None:
    """Writes a job's metrics; `torn` is a line that is being written."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (make_folder(home.job(job)) / "metrics.jsonl").write_text(text + torn)


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
    store.jobs.change(job, JobState.FINISHED, release="it has ended", step=5)
