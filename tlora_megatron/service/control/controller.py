"""The controller of a service: takes in events and requests, asks a policy, carries out its answer.

It keeps nothing that the store does not: killed at any moment, the next one takes over, and gangs
train on meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tlora_megatron.scheduler.fleet import InvariantError
from tlora_megatron.scheduler.policy import RegroupCost
from tlora_megatron.service.control.admit import Admission
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.decide import Decider
from tlora_megatron.service.control.events import EventHandler, Measurements
from tlora_megatron.service.control.executor import EngineLost, Executor, GuardedEngine
from tlora_megatron.service.control.pricing import Machines, Pricing, pricing_of
from tlora_megatron.service.control.recover import Watchdog, end_missing, take_over
from tlora_megatron.service.control.show import StatusWriter
from tlora_megatron.service.control.state import SchedulerState
from tlora_megatron.service.engines.base import GangEngine
from tlora_megatron.service.engines.protocol import GangInfo
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import UNSTORED_SEQ, Command
from tlora_megatron.service.prepare.pool import PreparePool
from tlora_megatron.service.prepare.submission import PrepareRules
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import JobState, LockLost, Store, StoreError, open_store
from tlora_megatron.service.sweeps import settle, sweep_of

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.25
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
        engine: GangEngine[Any],
        pricing: Pricing,
        validator: PreparePool,
        settings: Settings,
        clock: Callable[[], float] | None = None,
        on_said: Callable[[str], None] = logger.info,
    ) -> None:
        """Takes over what an earlier controller left; the store's lock must be held."""
        self.context = Context(
            home=home,
            store=store,
            engine=cast(GangEngine[Any], GuardedEngine(engine)),
            settings=settings,
            pricing=pricing,
            state=SchedulerState(Machines.of(engine.nodes()), pricing, last_gang=0),
            clock=clock or steady_clock(store.database.clock),
            cost=RegroupCost(),
            on_said=on_said,
        )
        self._validator = validator
        self._flushed_s = self._beaten_s = self._refused_s = float("-inf")
        self._trouble: str | None = None
        self._measurements = Measurements(self.context)
        self._events = EventHandler(self.context, self._measurements)
        self._executor = Executor(self.context)
        self.decider = Decider(self.context)
        self._watchdog = Watchdog(self.context, self._executor)
        self._status = StatusWriter(self.context)
        self._reload()
        jobs, gangs = len(self.context.state.jobs), len(self.context.state.gangs)
        if jobs or gangs:
            self.context.say("took_over", f"took over {jobs} jobs and {gangs} gangs")

    def _reload(self) -> None:
        self.decider.forget()
        self._status.forget()
        last_event = take_over(self.context)
        self._admission = Admission(self.context, self._validator, last_event)
        self._take_events()
        end_missing(self.context)
        jobs = list(self.context.state.jobs.values())
        self.context.unsettled |= {live.sweep for live in jobs if live.sweep is not None}
        self._admission.take(live for live in jobs if live.requested != "cancel")
        for live in jobs:
            if live.requested is not None and not live.state.is_over:
                with self.context.store.transaction():
                    self._admission.fulfil(live)
        self._executor.send()

    def step(self) -> None:
        now_s = self.context.clock()
        if now_s < self._refused_s + _RETRY_S:
            return
        try:
            if self._trouble is not None:
                self.context.store.lock.beat()
                self.context.well_since_s = self.context.clock()
                self._reload()
            self._step(now_s)
            if self._trouble is not None:
                self.context.say("recovered", f"{self._trouble}: all is well again")
            self._trouble = None
        except LockLost:
            raise
        except StoreError as error:
            self._refuse("store", f"the store refuses to write ({error})")
        except EngineLost as error:
            self._refuse("engine", f"the engine does not answer ({error})")
        except OSError as error:
            self._refuse("disk", f"the service's folder cannot be used ({error})")
        except InvariantError as error:
            logger.exception("the scheduler state is rebuilt")
            self._refuse("state", f"the scheduler state is inconsistent ({error})")

    def _step(self, now_s: float) -> None:
        self._take_events()
        self._settle_sweeps()
        self._admission.look()
        if self._watchdog.look():
            self._reload()
        self._flush(now_s)
        self._measurements.refresh()
        self.decider.step()
        self._executor.run()

    def _settle_sweeps(self) -> None:
        """Asks of trials what was decided at their rungs."""
        store = self.context.store
        for sweep in sorted(self.context.unsettled):
            with store.transaction():
                if (found := sweep_of(store, sweep)) is not None:
                    settle(store, found)
            self.context.unsettled.discard(sweep)

    def _take_events(self) -> None:
        gangs = self.context.state.gangs.values()
        cursor = {(gang.name, gang.epoch): gang.last_event for gang in gangs}
        events = self.context.engine.poll(cursor)
        # An engine may repeat events of gangs that have ended.
        new = [event for event in events if (event.gang, event.epoch) in cursor]
        for gang, what in self._events.apply(new).items():
            self._watchdog.end(gang, what)

    def end_gangs(self) -> None:
        """Saves all jobs and ends all gangs; their jobs wait for the next controller."""
        try:
            self._end_gangs()
        except (StoreError, OSError) as error:
            self.context.on_said(
                f"the store refuses to write ({error}): gangs are told through their folders to "
                "save their jobs and end"
            )
            self._end_without_store()

    def _end_without_store(self) -> None:
        """Ends all gangs; the next controller reads in their folders what became of their jobs."""
        context, engine, settings = self.context, self.context.engine, self.context.settings

        def living() -> list[GangInfo]:
            return [info for info in engine.gangs() if info.alive]

        for info in living():
            engine.post(
                Command(
                    gang=info.gang,
                    epoch=info.epoch,
                    seq=UNSTORED_SEQ,
                    kind="stop",
                    body={"save": True},
                )
            )
        until_s = context.clock() + settings.end_gangs_s
        while living() and context.clock() < until_s:
            engine.poll({})
            time.sleep(settings.poll_s)
        for info in living():
            why = f"did not stop within {settings.end_gangs_s:.0f} s and was killed"
            context.on_said(f"gang {info.gang} {why}")
            engine.kill(info.gang, info.epoch)

    def _end_gangs(self) -> None:
        context, until_s = self.context, self.context.clock() + self.context.settings.end_gangs_s
        with context.store.transaction():
            for gang in list(context.state.gangs.values()):
                self._executor.stop(gang)
        self._executor.send()
        while context.state.gangs and context.clock() < until_s:
            self._take_events()
            time.sleep(context.settings.poll_s)
        with context.store.transaction():
            for gang in list(context.state.gangs.values()):
                why = f"did not stop within {context.settings.end_gangs_s:.0f} s"
                context.say("hung", f"gang {gang.name} {why} and was killed", gang=gang.name)
                self._executor.kill(gang, why)
            context.store.jobs.progress(list(context.progress.values()))
            for live in list(context.state.jobs.values()):
                if live.state is JobState.MOVING and context.store.leases.of(live.id) is None:
                    context.change(live, JobState.QUEUED, why="the service was stopped")

    def next_s(self) -> float:
        """When there is something to do though nothing happens."""
        if self._admission.has_more:
            return self.context.clock()
        return min(self.decider.due_s(), self._watchdog.due_s(), self.context.acts_at_s)

    @property
    def pause_s(self) -> float:
        """Time until the next look at engine and store; longer where there is neither job nor gang:
        whoever submits then waits seconds for a gang."""
        state = self.context.state
        if self._admission.has_more:
            return 0.0
        return self.context.settings.poll_s if state.jobs or state.gangs else _IDLE_POLL_S

    def _flush(self, now_s: float) -> None:
        """Writes reports of steps and what others may see, and beats for the lock."""
        context = self.context
        if now_s - self._flushed_s >= _FLUSH_S:
            self._flushed_s = now_s
            changed = self._status.changed()
            if changed or context.progress:
                with context.store.transaction():
                    context.store.jobs.progress(list(context.progress.values()))
                    self._status.show(changed)
            context.progress.clear()
        if now_s - self._beaten_s >= _BEAT_S:
            self._beaten_s = now_s
            context.store.lock.beat()

    def _refuse(self, what: str, message: str) -> None:
        """Reports trouble once; the state, ahead of the store, is rebuilt when it is over."""
        self._refused_s = self.context.clock()
        if self._trouble is None:
            self._trouble = what
            self.context.on_said(f"{message}: gangs train on, nothing new starts until it is back")

    def close(self) -> None:
        """Stops deciding; gangs train on."""
        self.decider.close()
        self._validator.close()


def steady_clock(clock: Callable[[], float] = time.time) -> Callable[[], float]:
    """Unix seconds that never jump, even where the clock of the store or host is set back."""
    begin_s = clock() - time.monotonic()
    return lambda: begin_s + time.monotonic()


def serve(
    root: str | Path | None,
    engine: GangEngine[Any],
    *,
    settings: Settings | None = None,
    stop: threading.Event | None = None,
    store: Store | None = None,
    said: Callable[[str], None] = logger.info,
    validator: PreparePool | None = None,
    pricing: Pricing | None = None,
) -> None:
    """Runs a service's controller until `stop` is set; gangs then train on.

    Args:
        root: the service's folder; None: that of the environment.
        store: None: opened as the settings say, and closed in the end.
        said: gets each sentence for the user.
        validator: None: a pool of processes.
        pricing: None: by the planner and a hardware profile.

    Raises:
        RuntimeError: if another controller runs on the store.
    """
    settings, stop, home = settings or Settings(), stop or threading.Event(), Home.open(root)
    held = store or open_store(settings.database or home.store)
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
            try:
                held.lock.release()
            except StoreError as error:  # it ends by itself
                logger.warning("the lock of the store is left as it is: %s", error)
    finally:
        if store is None:
            held.close()


def _step_until(controller: Controller, stop: threading.Event, settings: Settings) -> None:
    try:
        while not stop.is_set():
            controller.step()
            stop.wait(controller.pause_s)
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
    pool = PreparePool(rules, workers=settings.prepare_processes)
    pool.warm()
    return pool
