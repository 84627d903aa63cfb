"""The controller of a service: hears gangs and users, lets a policy decide, and carries that out.

It keeps nothing that the store does not: killed at any moment, the next one takes over, and gangs
train on meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tlora_megatron.scheduler.invariants import InvariantError
from tlora_megatron.scheduler.policy import RegroupCost
from tlora_megatron.service.control.books.books import Books
from tlora_megatron.service.control.books.hardware import pricing_of
from tlora_megatron.service.control.books.machines import Machines
from tlora_megatron.service.control.books.pricing import Pricing
from tlora_megatron.service.control.carrying import Carrying
from tlora_megatron.service.control.deciding import Deciding
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.control.faults.guarded import EngineLost, GuardedEngine
from tlora_megatron.service.control.faults.takeover import bury_missing, take_over
from tlora_megatron.service.control.faults.watching import Watching
from tlora_megatron.service.control.hearing import Hearing
from tlora_megatron.service.control.intake import Intake, Validator
from tlora_megatron.service.control.measuring import Measuring
from tlora_megatron.service.control.settings import Settings
from tlora_megatron.service.control.showing import Showing
from tlora_megatron.service.engines.protocol import GangEngine
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.outcome import PrepareRules
from tlora_megatron.service.prepare.pool import PreparePool
from tlora_megatron.service.store import JobState, LockLost, Store, StoreError, open_store

logger = logging.getLogger(__name__)

_FLUSH_S = 1.0
"""Reports of steps wait so long to be written together."""
_BEAT_S = 3.0
_RETRY_S = 1.0
"""After a store that refuses to write, or an engine that does not answer."""


class Controller:
    """One wake-up after another; `serve` calls it in real time, a replay on a clock of its own."""

    def __init__(
        self,
        *,
        home: Home,
        store: Store,
        engine: GangEngine,
        pricing: Pricing,
        validator: Validator,
        settings: Settings,
        clock: Callable[[], float] | None = None,
        on_said: Callable[[str], None] = logger.info,
    ) -> None:
        """Takes over what an earlier controller left; the store's lock must be held."""
        self.desk = Desk(
            home=home,
            store=store,
            engine=GuardedEngine(engine),
            settings=settings,
            pricing=pricing,
            books=Books(Machines.of(engine.nodes()), pricing, first_name=0),
            clock=clock or steady_clock(store.database.clock),
            cost=RegroupCost(),
            on_said=on_said,
        )
        self._validator = validator
        self._flushed_s = self._beaten_s = self._refused_s = float("-inf")
        self._trouble: str | None = None
        self._measuring = Measuring(self.desk)
        self._hearing = Hearing(self.desk, self._measuring)
        self._carrying = Carrying(self.desk)
        self.deciding = Deciding(self.desk)
        self._watching = Watching(self.desk, self._carrying)
        self._showing = Showing(self.desk)
        self._reload()
        jobs, gangs = len(self.desk.books.jobs), len(self.desk.books.gangs)
        if jobs or gangs:
            self.desk.say("took_over", f"took over {jobs} jobs and {gangs} gangs")

    def _reload(self) -> None:
        """Makes the books anew from the store."""
        self.deciding.forget()
        self._showing.forget()
        last_event = take_over(self.desk)
        self._intake = Intake(self.desk, self._validator, last_event)
        self._hear()
        bury_missing(self.desk)
        for live in list(self.desk.books.jobs.values()):
            self._intake.take(live)
            if live.wish is not None and not live.state.is_over:
                with self.desk.store.transaction():
                    self._intake.fulfil(live)
        self._carrying.send()

    def step(self) -> None:
        """Does all that there is to do now."""
        now_s = self.desk.clock()
        if now_s < self._refused_s + _RETRY_S:
            return
        try:
            if self._trouble is not None:
                self.desk.store.lock.beat()
                self._reload()
            self._step(now_s)
            if self._trouble is not None:
                self._recovered()
        except LockLost:
            raise
        except StoreError as error:
            self._refuse("store", f"the store refuses to write ({error})")
        except EngineLost as error:
            self._refuse("engine", f"the engine does not answer ({error})")
        except OSError as error:
            self._refuse("disk", f"the service's folder cannot be used ({error})")
        except InvariantError as error:
            logger.exception("the books are made anew")
            self._refuse("books", f"the controller's books do not balance ({error})")

    def _step(self, now_s: float) -> None:
        self._hear()
        self._intake.look()
        if self._watching.look():
            self._reload()
        self._flush(now_s)
        self._measuring.refresh()
        self.deciding.step()
        self._carrying.act()

    def _hear(self) -> None:
        gangs = self.desk.books.gangs.values()
        cursor = {(gang.name, gang.epoch): gang.heard for gang in gangs}
        events = self.desk.engine.poll(cursor)
        # An engine may repeat what gangs told that have ended.
        new = [event for event in events if (event.gang, event.epoch) in cursor]
        for gang, what in self._hearing.hear(new).items():
            self._watching.end(gang, what)

    def end_gangs(self) -> None:
        """Saves all jobs and ends all gangs; their jobs wait for the next controller."""
        desk, until_s = self.desk, self.desk.clock() + self.desk.settings.end_gangs_s
        with desk.store.transaction():
            for gang in list(desk.books.gangs.values()):
                self._carrying.stop(gang)
        self._carrying.send()
        while desk.books.gangs and desk.clock() < until_s:
            self._hear()
            time.sleep(desk.settings.poll_s)
        with desk.store.transaction():
            for gang in list(desk.books.gangs.values()):
                why = f"did not stop within {desk.settings.end_gangs_s:.0f} s"
                desk.say("hung", f"gang {gang.name} {why} and was killed", gang=gang.name)
                self._carrying.kill(gang, why)
            desk.store.jobs.progress(list(desk.progress.values()))
            for live in list(desk.books.jobs.values()):
                if live.state is JobState.MOVING and desk.store.leases.of(live.id) is None:
                    desk.change(live, JobState.QUEUED, why="the service was stopped")

    def next_s(self) -> float:
        """When there is something to do though nothing happens."""
        if self._intake.has_more:
            return self.desk.clock()
        return min(self.deciding.due_s(), self._watching.due_s(), self.desk.acts_at_s)

    def _flush(self, now_s: float) -> None:
        """Writes reports of steps and what others may see, and beats for the lock."""
        desk = self.desk
        if now_s - self._flushed_s >= _FLUSH_S:
            self._flushed_s = now_s
            changed = self._showing.changed()
            if changed or desk.progress:
                with desk.store.transaction():
                    desk.store.jobs.progress(list(desk.progress.values()))
                    self._showing.show(changed)
            desk.progress.clear()
        if now_s - self._beaten_s >= _BEAT_S:
            self._beaten_s = now_s
            desk.store.lock.beat()

    def _refuse(self, what: str, message: str) -> None:
        """Tells of trouble once; the books, ahead of the store, are made anew when it is over."""
        self._refused_s = self.desk.clock()
        if self._trouble is None:
            self._trouble = what
            self.desk.on_said(f"{message}: gangs train on, nothing new starts until it is back")

    def _recovered(self) -> None:
        self.desk.say("recovered", f"{self._trouble}: all is well again")
        self._trouble = None

    def close(self) -> None:
        """Stops deciding; gangs train on."""
        self.deciding.close()
        self._validator.close()


def steady_clock(clock: Callable[[], float] = time.time) -> Callable[[], float]:
    """Unix seconds that never jump; where the host's clock is set back, signs of life go on.

    Args:
        clock: the store's, by which leases that another host's controller granted run out.
    """
    begin_s = clock() - time.monotonic()
    return lambda: begin_s + time.monotonic()


def serve(
    root: str | Path | None,
    engine: GangEngine,
    *,
    settings: Settings | None = None,
    stop: threading.Event | None = None,
    store: Store | None = None,
    said: Callable[[str], None] = logger.info,
    validator: Validator | None = None,
    pricing: Pricing | None = None,
) -> None:
    """Runs a service's controller until `stop` is set; gangs then train on.

    Args:
        root: the service's folder; None: that of the environment.
        engine: starts and watches gangs.
        settings: None: all defaults.
        stop: set it to end the call.
        store: None: opened as the settings say, and closed in the end.
        said: gets each sentence that is told.
        validator: None: a pool of processes.
        pricing: None: by the planner and a hardware profile.

    Raises:
        RuntimeError: if another controller runs on the store.
    """
    settings, stop, home = settings or Settings(), stop or threading.Event(), Home.open(root)
    opened = None if store is not None else open_store(settings.database or home.store)
    held = store or opened
    assert held is not None, "a store is given or opened"
    try:
        held.lock.take()
        try:
            controller = Controller(
                home=home,
                store=held,
                engine=engine,
                pricing=pricing or pricing_of(engine.nodes(), settings),
                validator=validator or _pool(home, settings),
                settings=settings,
                on_said=said,
            )
            _step_until(controller, stop, settings)
        finally:
            held.lock.release()
    finally:
        if opened is not None:
            opened.close()


def _step_until(controller: Controller, stop: threading.Event, settings: Settings) -> None:
    try:
        while not stop.is_set():
            controller.step()
            stop.wait(settings.poll_s)
        if settings.end_gangs:
            controller.end_gangs()
    finally:
        controller.close()


def _pool(home: Home, settings: Settings) -> PreparePool:
    rules = PrepareRules(
        root=str(home.root),
        micro_batch_tokens=settings.micro_batch_tokens,
        data_root=settings.data_root,
    )
    pool = PreparePool(rules)
    pool.warm()
    return pool
