"""Plays the gang of driven jobs: takes what their request logs hold, answers without a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from sqlalchemy import update

from tlora_megatron.runtime.sampling.values import PEFT_FILES
from tlora_megatron.service.home import Home
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import JobState, Store, tables
from tlora_megatron.training.driven_requests import Answer, Request
from tlora_megatron.training.saving.writer import FOLDER, publish


def set_state(store: Store, job: str, state: JobState, error: str | None = None) -> None:
    """Puts a job into a state, with no gang."""
    values = {"state": state.value, "error": error}
    if state is JobState.RUNNING:
        values["started_at"] = 1.0
    with store.database.write() as connection:
        connection.execute(update(tables.job).where(tables.job.c.id == job).values(**values))


class PlayedModels:
    """Driven jobs that learn nothing: a log-probability is minus a tenth of its token's target."""

    def __init__(self, home: Home, store: Store) -> None:
        self._home = home
        self._store = store
        self.done: list[tuple[str, Request]] = []
        """Requests that were carried out, by the jobs' ids, in order."""
        self.weights: str | None = None
        """What adapters hold that are saved from now on; None: no file of an adapter."""

    def step(self) -> None:
        """Lets all jobs start, and carries out what waits there."""
        for job in self._store.jobs.page(limit=1000):
            if job.state is JobState.VALIDATING:
                set_state(self._store, job.id, JobState.RUNNING)
            log = RequestLog(self._home.job(job.id))
            number = 1
            while log.state(number) in ("answered", "gone"):
                number += 1
            while log.state(number) == "waiting":
                request = log.read_request(number)
                answer = self._answer(job.id, number, request)
                self.done.append((job.id, request))  # before a client can know
                log.write_answer(number, answer)
                number += 1

    def ops(self) -> list[str]:
        return [request.op for _, request in self.done]

    def _answer(self, job: str, number: int, request: Request) -> Answer:
        if request.has_sequences:
            logprobs = -0.1 * request.arrays["targets"].astype(np.float32)
            told = {
                key: request.params[key] for key in ("runs", "loss_fn") if key in request.params
            }
            metrics = {"loss:sum": float(-logprobs.sum())}
            return Answer(logprobs=logprobs, values=told, metrics=metrics)
        if request.op == "optim_step":
            return Answer(metrics={"grad_norm": 0.5}, values={"step": 1})
        if request.op in ("save_state", "save_for_sampler"):
            return self._save(job, number, request)
        if request.op == "leave":
            set_state(self._store, job, JobState.FINISHED)
        return Answer(values={"step": 1})

    def _save(self, job: str, number: int, request: Request) -> Answer:
        kind = "states" if request.op == "save_state" else FOLDER
        place = f"jobs/{job}/{kind}/{request.params['name']}"
        document: Mapping[str, object] = self._store.jobs.document(job)["document"]

        def write(folder: Path) -> int:
            folder.mkdir(parents=True)
            if kind != FOLDER or self.weights is None:
                (folder / "state.json").write_text(json.dumps({"job": document}))
                return 0
            for file in PEFT_FILES:
                (folder / file).write_text(self.weights)
            return 0

        name = Path(self._home.root, place)
        if kind == FOLDER:
            publish(name, number, write, lambda: None)
        else:
            write(name)
        return Answer(values={"path": place, "step": number})


@contextmanager
def playing(home: Home, store: Store) -> Iterator[PlayedModels]:
    """Plays in a thread of its own."""
    models, ended = PlayedModels(home, store), threading.Event()

    def run() -> None:
        while not ended.wait(0.005):
            models.step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield models
    finally:
        ended.set()
        thread.join()
