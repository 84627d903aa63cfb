"""A controller in this process that rules real gangs of this host, for tests and benchmarks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.helpers.launch import HANG_S
from tests.helpers.stored_jobs import ValidatorHere, submit_all
from tlora_megatron.service.control.controller import Controller
from tlora_megatron.service.control.pricing import Pricing
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import PrepareRules
from tlora_megatron.service.prepare.worker import validate
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import Job, JobState, open_store

_LOOK_S = 0.02


class RuledService:
    """Controller, store and engine; `until` has them work."""

    def __init__(
        self,
        root: Path,
        engine: LocalEngine,
        pricing: Pricing,
        base_model: Mapping[str, Any],
        settings: Settings,
    ) -> None:
        self.home = Home.open(root)
        self.engine = engine
        self._base = base_model
        self.store = open_store(self.home.store)
        self.store.lock.take()
        rules = PrepareRules(root=str(root), micro_batch_tokens=settings.micro_batch_tokens)
        self.controller = Controller(
            home=self.home,
            store=self.store,
            engine=engine,
            pricing=pricing,
            validator=ValidatorHere(lambda job, submission: validate(job, submission, rules)),
            settings=settings,
            on_said=print,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.controller.close()
        for info in self.engine.gangs():
            self.engine.kill(info.gang, info.epoch)
        self.engine.close()
        self.store.close()

    def submit(self, *documents: Mapping[str, Any]) -> None:
        """Submits jobs together; each may have a section `service`."""
        document = {"base_model": dict(self._base), "jobs": list(documents)}
        submit_all(self.store, document, Path.cwd())

    def job(self, name: str) -> Job:
        return self.store.jobs.find(name, tenant="local")

    def is_over(self, *names: str) -> bool:
        """True once these jobs have finished."""
        rows = [self.job(name) for name in names]
        assert not any(row.state is JobState.FAILED for row in rows), [r.error for r in rows]
        return all(row.state is JobState.FINISHED for row in rows)

    def trains_on(self, name: str) -> Sequence[int]:
        """GPUs of the gang in which a job trains now; none if it does not."""
        row = self.job(name)
        gang = self.controller.context.state.gangs.get(row.gang or "")
        member = None if gang is None else gang.members.get(row.id)
        return gang.gpus if gang and member is not None and member.phase == "training" else ()

    def steps(self, name: str) -> int:
        live = self.controller.context.state.jobs.get(self.job(name).id)
        return self.job(name).step if live is None else live.step

    def make_moves(
        self,
        jobs: Mapping[str, Mapping[str, Any]],
        allow: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Submits four jobs, each when the long one has settled, and waits for their ends.

        `long` is alone on two GPUs when `small` and `other` come, and again when `wide` does.

        Args:
            jobs: documents by name.
            allow: gets how far `long` may train for now, so that it never ends too early.
        """

        def settled(beyond: int) -> bool:
            assert not self.is_over("long"), "the long job must outlast the others"
            return len(self.trains_on("long")) == 2 and self.steps("long") > beyond

        allow(4)
        self.submit(jobs["long"])
        self.until(lambda: settled(2), "the long job trains on both GPUs")
        self.submit(jobs["small"], jobs["other"])
        self.until(lambda: self.is_over("small", "other"), "the small jobs end")
        self.until(lambda: settled(0), "the long job grows again")
        grown = self.steps("long")
        allow(grown + 2)
        self.until(lambda: settled(grown), "the long job trains on")
        self.submit(jobs["wide"])
        self.until(lambda: self.is_over("wide"), "the wide job ends")
        allow(sys.maxsize)
        self.until(lambda: self.is_over(*jobs), "all jobs end")

    def until(self, is_reached: Callable[[], bool], what: str, limit_s: float = HANG_S) -> None:
        """Has the controller work until something is so."""
        end_s = time.monotonic() + limit_s
        while not is_reached():
            rows = self.store.jobs.page()
            assert time.monotonic() < end_s, (what, [(r.name, r.state, r.step) for r in rows])
            self.controller.step()
            time.sleep(_LOOK_S)
