"""200 tenants of the `tinker` SDK on one super-model that only pretends: what the door costs.

All their requests that wait are taken at once, as a round of the real loop does, and answered after
the time that such a round would take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from scripts.bench.door_cases import tenants
from scripts.bench.door_cases.notes import Notes
from scripts.bench.door_cases.serving import BASE, Served, serving
from tests.helpers.played_models import set_state
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import JobState
from tlora_megatron.training.driven_requests import Answer, Request

ROUND_S = 0.02
TOKENS_PER_S = 100_000.0
"""A round takes `ROUND_S`, and its tokens at this speed."""
_LOOK_S = 0.005


class PretendedGang:
    """Takes the next request of every job at once, and answers without a model."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._logs: dict[str, tuple[RequestLog, int]] = {}
        self.rounds = 0
        self.widest = 0
        """Most jobs in one round."""

    def play(self, ended: threading.Event) -> None:
        """Goes on until it is told to end."""
        while not ended.wait(_LOOK_S):
            self._meet()
            taken = self._take()
            if taken:
                self._round(taken)

    def _meet(self) -> None:
        for job in self._served.store.jobs.page(states=[JobState.VALIDATING], limit=1000):
            set_state(self._served.store, job.id, JobState.RUNNING)
            self._logs[job.id] = (RequestLog(self._served.home.job(job.id)), 1)

    def _take(self) -> dict[str, Request]:
        found = {}
        for job, (log, number) in self._logs.items():
            if log.state(number) == "waiting":
                found[job] = log.read_request(number)
        return found

    def _round(self, taken: dict[str, Request]) -> None:
        rows = [request.arrays["targets"] for request in taken.values() if request.has_sequences]
        time.sleep(ROUND_S + sum(map(len, rows)) / TOKENS_PER_S)
        for job, request in taken.items():
            log, number = self._logs[job]
            log.write_answer(number, _answer(request))
            self._logs[job] = (log, number + 1)
        self.rounds += 1
        self.widest = max(self.widest, len(taken))


def _answer(request: Request) -> Answer:
    if request.has_sequences:
        logprobs = np.full(len(request.arrays["targets"]), -1.0, np.float32)
        return Answer(logprobs=logprobs, metrics={"loss:sum": float(len(logprobs))})
    return Answer(metrics={"grad_norm": 1.0}, values={"step": 1})


@contextmanager
def pretending(served: Served) -> Iterator[PretendedGang]:
    """Plays in a thread."""
    gang, ended = PretendedGang(served), threading.Event()
    thread = threading.Thread(target=gang.play, args=(ended,), daemon=True)
    thread.start()
    try:
        yield gang
    finally:
        ended.set()
        thread.join()


def measure(notes: Notes, folder: Path, *, count: int, steps: int, think_s: float) -> None:
    """Notes steps a second, and how long one takes beyond its two rounds."""
    with (
        serving(folder / "pretending") as served,
        notes.load("tenants"),
        pretending(served) as gang,
    ):
        plan = tenants.Plan(
            address=served.address,
            base=BASE,
            tokens=tuple(served.tokens(count)),
            first=0,
            steps=steps,
            think_s=think_s,
            sequences=4,
            length=64,
        )
        cpu_s = served.cpu_s
        done = tenants.run(plan)
        cpu_s = served.cpu_s - cpu_s
    what = f"{count} tenants of tinker on a gang that pretends, {think_s:g} s to think"
    took_s = max(step.begin_s + step.took_s for step in done) - done[0].begin_s
    notes.row(f"{what}: steps", len(done) / took_s, "1/s")
    notes.row(f"{what}: jobs in the widest round", gang.widest, "jobs")
    notes.row(f"{what}: CPU of the server for a step", 1e3 * cpu_s / len(done), "ms")
    least_s = 2 * ROUND_S + 4 * 64 / TOKENS_PER_S
    notes.spread(f"{what}: step beyond two rounds", [step.took_s - least_s for step in done])
