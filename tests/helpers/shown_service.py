"""A busy service to look at: two machines, jobs of three tenants, ten minutes of past, and losses.

    python -m tests.helpers.shown_service      # serves it on a port until Ctrl-C

The controller and its decisions are real; gangs only pretend, and losses are made up.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.fake_gang import FakeTimes
from tests.helpers.http_service import Api, listening
from tests.helpers.live_service import TOKENS, LiveService
from tlora_megatron.service.api.server import make_app
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import LIVE, Progress
from tlora_megatron.training.metrics import METRICS_FILE

PAST_S = 600.0
MARKUP = "<script>alert(1)</script>"
_JOBS = (
    # second, name, tenant, steps, batch, GPUs, bound
    (0, "support-tone", "ann", 900, 7, 1, 1.5),
    (5, "sql-dialect", "bob", 900, 8, 1, 1.8),
    (20, "contracts-de", "ann", 1200, 14, 2, 2.0),
    (40, "radiology", "cyd", 1300, 9, 1, 1.6),
    (60, "router-small", "bob", 120, 2, 1, 2.0),
    (90, "chat-nl", "ann", 800, 6, 1, 2.0),
    (130, "tickets-v2", "cyd", 700, 7, 1, 1.5),
    (180, "poems", "ann", 60, 2, 1, 1.5),
    (240, "math-steps", "bob", 900, 8, 1, 1.6),
    (300, "legal-fr", "cyd", 800, 5, 1, 1.7),
    (380, "code-review", "ann", 800, 9, 1, 1.5),
    (450, "summaries", "bob", 900, 10, 1, 1.2),
    (500, "wide-batch", "cyd", 900, 30, 2, 1.1),
    (520, "wider-batch", "ann", 900, 80, 4, 1.1),
    (540, "night-shift", "ann", 900, 80, 4, 1.1),
    (560, MARKUP, "ann", 900, 30, 4, 1.1),
)


class ShownService:
    """A service with a past, whose time goes on when it is told to."""

    def __init__(self, root: Path, *, num_jobs: int = len(_JOBS)) -> None:
        begin_s = time.time() - PAST_S
        self.live = LiveService(
            root, nodes=2, gpus=2, begin_s=begin_s, times=FakeTimes(start_s=6.0)
        )
        self.ids: dict[str, str] = {}
        self._told: dict[str, int] = {}
        for at_s, name, tenant, steps, batch, gpus, bound in _JOBS[:num_jobs]:
            self.live.run(begin_s + at_s - self.live.now_s)
            self.ids[name] = self.live.submit(
                name, tenant=tenant, steps=steps, batch=batch, gpus=gpus, max_slowdown=bound
            )
        self.live.controller.context.state.set_aside.put([3], self.live.now_s)
        for name in {"night-shift"} & set(self.ids):
            self.live.store.jobs.request_action(self.ids[name], "pause")
        self.go_on()

    def go_on(self) -> None:
        """Lets the service's time pass until now."""
        self.live.run(max(0.01, time.time() - self.live.now_s))
        self.learn()

    def learn(self) -> None:
        """Gives the steps that were taken their losses."""
        for job in self.live.store.jobs.page(states=LIVE, limit=1000):
            self._learn(job.id, job.number, job.step)

    def _learn(self, job: str, number: int, step: int) -> None:
        """Writes the job's steps since the last time, with losses that fall."""
        folder = self.live.home.job(job)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / METRICS_FILE).open("a") as file:
            for at in range(self._told.get(job, 0) + 1, step + 1):
                row = {"step": at, "loss": loss_at(number, at), "tokens": TOKENS}
                file.write(json.dumps(row) + "\n")
                if at % 50 == 0:
                    file.write(json.dumps({"step": at, "eval_loss": 0.1 + row["loss"]}) + "\n")
        self._told[job] = step
        report = Progress(job=job, step=step, tokens=step * TOKENS, loss=loss_at(number, step))
        self.live.store.jobs.progress([report])

    def api(self) -> Api:
        service = Service.of(self.live.home, self.live.store)
        return Api(service, make_app(service))


def loss_at(number: int, step: int) -> float:
    """A loss that falls and trembles, another one for each job."""
    start, speed = 2.2 + 0.35 * (number % 5), 40 + 17 * (number % 4)
    tremble = 0.08 * math.sin(1.7 * step + number) + 0.05 * math.sin(0.31 * step * number)
    return 0.4 + start * math.exp(-step / speed) + tremble * (0.3 + math.exp(-step / 150))


@contextmanager
def shown_service(root: Path, *, num_jobs: int = len(_JOBS)) -> Iterator[tuple[ShownService, Api]]:
    shown = ShownService(root, num_jobs=num_jobs)
    try:
        yield shown, shown.api()
    finally:
        shown.live.store.close()


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        shown_service(Path(folder) / "s") as (shown, api),
        listening(api.app) as address,
    ):
        admin = api.token("ann", ("submit", "read", "admin"))
        print(f"{address}/#token={admin}", flush=True)
        print(f"{address}/#token={api.token('ann')}", flush=True)
        while True:
            shown.go_on()
            time.sleep(1.0)


if __name__ == "__main__":
    main()
