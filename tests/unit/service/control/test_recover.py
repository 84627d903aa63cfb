"""A controller goes on where rows, disks, machines, gangs and itself are not as they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.helpers.live_service import LiveService, one_job
from tests.helpers.session import ALL_TESTS
from tests.helpers.store_chaos import check
from tlora_megatron.service.control import executor
from tlora_megatron.service.control.controller import steady_clock
from tlora_megatron.service.engines.protocol import NodeInfo
from tlora_megatron.service.store import NewJob

_GONE = NodeInfo(node=1, address="", gpus=1, healthy=False)


def _two_gangs(root: Path, steps: int = 30) -> LiveService:
    service = LiveService(root, nodes=2, policy="isolated")
    for name in ("one", "two"):
        service.submit(name, steps=steps, batch=10, max_slowdown=1.0)
    service.run(10)
    assert set(service.states().values()) == {"running"}
    return service


@pytest.mark.parametrize("restarts", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_a_machine_is_lost_and_comes_back(root: Path, listed: bool, restarts: bool) -> None:
    service = _two_gangs(root, steps=60)
    service.engine.machines[1:] = [_GONE] if listed else []
    if restarts:
        service.restart()
    service.run(20)
    assert sorted(service.states().values()) == ["queued", "running"]
    assert restarts or not listed or service.sentences("node_down")
    service.engine.machines[1:] = [replace(_GONE, healthy=True)]
    service.run(20)
    assert set(service.states().values()) == {"running"}
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert not service.engine.doubled


def test_a_job_outlives_a_service_of_fewer_gpus(root: Path) -> None:
    service = LiveService(root, nodes=2)
    service.submit("small", steps=5)
    wide = service.submit("wide", steps=30, gpus=2, max_slowdown=1.0)
    service.run(10)
    both, service.engine.machines = service.engine.machines, service.engine.machines[:1]
    for _ in range(2):
        service.restart()
        service.run(20)
    assert service.states() == {"small": "finished", "wide": "queued"}
    assert service.sentences("waits") == [
        "job 'wide' waits until the service has 2 GPUs; it has 1 now"
    ]
    service.engine.machines = both
    service.run()
    assert service.job(wide).state == "finished"


def test_all_machines_are_gone_for_a_while(root: Path) -> None:
    service = _two_gangs(root)
    machines, service.engine.machines = service.engine.machines, []
    service.run(20)
    assert "it has no machine" in service.said[-1]
    service.engine.machines = machines
    service.run()
    assert set(service.states().values()) == {"finished"}


def test_the_names_of_gangs_count_on_behind_a_restart(root: Path) -> None:
    service = LiveService(root)
    for name in ("one", "two", "three"):
        service.restart()
        service.submit(name, steps=5)
        service.run(6000, until=lambda: not service.store.gangs.live())
    assert {gang.name for gang in service.store.gangs.since(0)} == {"g1", "g2", "g3"}


def test_a_row_that_cannot_be_read_fails_its_job_only(root: Path) -> None:
    service = LiveService(root)
    odd = NewJob(name="odd", document={"from": "elsewhere"}, base="base", key="odd")
    service.store.jobs.submit([odd])
    service.submit("good", steps=5)
    service.run()
    assert service.states() == {"odd": "failed", "good": "finished"}


def test_a_base_that_is_gone_fails_its_jobs_only(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, job = one_job(root, steps=30)

    def gone(self: object, base: str, section: Mapping[str, Any]) -> None:
        raise ValueError("base_model.path must be a folder, got none")

    with monkeypatch.context() as patch:
        patch.setattr("tlora_megatron.service.control.pricing.Pricing.add_base", gone)
        service.restart()
    assert "has lost its base: base_model.path must be" in str(service.job(job).error)
    service.submit("two", steps=5)
    service.run()
    assert service.states() == {"one": "failed", "two": "finished"}


def test_a_full_disk_delays_leases(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = LiveService(root)
    service.submit("one", steps=5)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "write_lease", full)
        service.run(10)
        assert "No space left on device" in service.said[-1]
    service.run()
    assert service.states() == {"one": "finished"}


def test_a_job_that_hangs_every_gang_fails(root: Path) -> None:
    service = LiveService(root, hang_s=30)
    job = service.submit("one", steps=60)

    def hang() -> bool:
        for gang in service.engine.all_gangs.values():
            gang.hangs = gang.hangs or bool(gang.jobs)
        return service.is_over

    service.run(until=hang)
    assert "the last one: its gang said nothing for 30 s" in str(service.job(job).error)
    assert len(service.engine.all_gangs) == service.settings.max_deaths


def test_who_stays_trains_on_though_the_model_refuses_the_rest(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = LiveService(root)
    jobs = [service.submit(name, steps=30, batch=2) for name in ("one", "two")]
    service.run(10)
    with monkeypatch.context() as patch:
        patch.setattr(service.controller.context.pricing.speeds, "rates", lambda *_: None)
        service.store.jobs.request_action(jobs[0], "cancel")
        service.run(3)
    service.run()
    assert service.states() == {"one": "cancelled", "two": "finished"}


def test_time_goes_on_where_the_hosts_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert clock() >= before


def test_a_lost_event_ends_its_gang_alone(root: Path) -> None:
    service = _two_gangs(root)
    (lost, whole) = service.engine.all_gangs.values()
    number = len(lost.events)
    lost.events.append(replace(lost.events[-1], number=number + 2))
    service.run(3)
    said = service.sentences("event_lost")
    assert said == [
        f"gang {lost.spec.gang} told event {number + 2} before event {number + 1} and was killed: "
        "it starts again"
    ]
    assert whole.alive
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert len(service.engine.all_gangs) == 3
    assert not service.engine.doubled


def test_the_end_of_a_gang_by_its_own_lease_stops_nothing_else(root: Path) -> None:
    service, job = one_job(root)
    service.gang.tell("applied", seq=0)
    service.gang.die("nothing was heard of a controller for 600 s")
    service.run()
    assert service.job(job).state == "finished"
    assert not any("refuses" in words for words in service.said)


def test_deaths_are_counted_across_controllers(root: Path) -> None:
    service = LiveService(root)
    job = service.submit("one", steps=60)

    def die() -> bool:
        gang = next((gang for gang in service.engine.all_gangs.values() if gang.alive), None)
        if gang is None:
            return False
        gang.die("illegal memory access")
        return True

    for _ in range(service.settings.max_deaths):
        service.run(until=die)
        service.run(0.1)
        service.restart()
    error = str(service.job(job).error)
    assert "got 3 deaths before it made a step" in error
    assert "the last one: illegal memory access" in error
    assert len(service.engine.all_gangs) == service.settings.max_deaths


def test_kills_from_outside_are_charged_to_no_job(root: Path) -> None:
    service = LiveService(root)
    jobs = [service.submit(name, steps=30, batch=2) for name in ("one", "two")]
    kills = 2 * service.settings.max_deaths

    def kill() -> bool:
        nonlocal kills
        for gang in service.engine.all_gangs.values():
            if gang.alive and gang.jobs and kills:
                gang.die("killed by signal 9", was_killed=True)
                kills -= 1
        return not kills

    service.run(until=kill)
    service.run()
    assert set(service.states().values()) == {"finished"}
    assert not service.sentences("quarantined")
    assert all("alone" not in service.job(job).schedule for job in jobs)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_whose_gang_died_is_saved_soon_until_it_leaves_one_in_order(
    root: Path, restarts: bool
) -> None:
    orders: list[Mapping[str, Any]] = []
    service = LiveService(root, checkpoint_every_s=45.0, on_order=orders.append)
    job = service.submit("one", steps=600, checkpoint_every_s=20.0)
    other = service.submit("two", steps=600)
    service.run(10)
    for _ in range(2):
        service.gang.die("killed by signal 9", was_killed=True)
        if restarts:
            service.restart()
        service.run(30)
    assert [order["checkpoint_every_s"] for order in orders if order["job"] == job] == [20.0] * 3
    assert [order["checkpoint_every_s"] for order in orders if order["job"] == other] == [45.0] * 3
    assert [order["saves_soon"] for order in orders if order["job"] == job] == [False, True, True]
    said = service.sentences("saves_soon")
    assert len(said) == 2
    assert "job 'one' is saved every few seconds at first" in said[0]
    service.store.jobs.request_action(job, "pause")
    service.run(30)
    service.store.jobs.request_action(job, "resume")
    service.run(30)
    assert orders[-1]["job"] == job
    assert not orders[-1]["saves_soon"]


@pytest.mark.parametrize(("saves_in_company", "until"), [(False, "from now on"), (True, "until 3")])
def test_a_job_that_was_set_apart_is_trusted_again_once(
    root: Path, saves_in_company: bool, until: str
) -> None:
    """And as if for the first time once it has trained on in company."""
    service = LiveService(root)
    job, good = service.submit("one", steps=600, batch=2), service.submit("two", steps=600, batch=2)

    def set_apart(times: int) -> bool:
        """The gang dies as long as both are in it."""
        for gang in service.engine.all_gangs.values():
            if gang.alive and {job, good} <= set(gang.jobs):
                gang.die("illegal memory access")
        said = [words for words in service.sentences("quarantined") if "'one'" in words]
        return len(said) == times

    service.run(600, until=lambda: set_apart(1))
    service.store.jobs.request_action(good, "cancel")
    service.run(600, until=lambda: bool(service.sentences("trusted")))
    assert service.sentences("trusted") == [
        "job 'one' has saved 3 checkpoints alone: it may train beside others again"
    ]
    assert "alone" not in service.job(job).schedule
    service.restart()
    good = service.submit("three", steps=60, batch=2)
    if saves_in_company:
        service.run(600, until=lambda: {job, good} <= set(service.gang.jobs))
        last = service.store.events.last()
        service.run(600, until=lambda: bool(service.store.events.after(last, kinds=["saved"])))
    service.run(600, until=lambda: set_apart(2))
    service.run()
    assert service.sentences("quarantined")[-1].startswith("job 'one' was in 3 gangs")
    assert f"alone {until}" in service.sentences("quarantined")[-1]
    assert service.states() == {"one": "finished", "two": "cancelled", "three": "finished"}


def test_a_killed_gang_without_proof_is_asked_after_by_the_next_controller(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = one_job(root, hang_s=30.0)
    gang = service.gang
    gang.hangs = True
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "kill", lambda *_: False)
        service.run(60)
        assert "its jobs wait until its lease has run out" in service.sentences("hung")[-1]
        service.restart()
    service.run(15)
    assert service.store.gangs.get(gang.spec.gang, 1).state == "ended"
    service.run()
    assert service.states() == {"one": "finished"}


SEEDS = range(200 if ALL_TESTS else 8)

CHANCES = (0.02, 0.05, 0.12)
"""Share of the effects at which a controller is killed."""

JOBS = {"one": 14, "two": 9, "three": 20}


class Killed(BaseException):
    """SIGKILL."""


class Reaper:
    """Kills before or behind some effects."""

    def __init__(self, seed: int) -> None:
        self.kills = 0
        self._random = Random(seed)
        self._chance = CHANCES[seed % len(CHANCES)]

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its chance to be the last."""

        def effect(*args: Any, **fields: Any) -> Any:
            self.look()
            result = call(*args, **fields)
            self.look()
            return result

        return effect

    @contextmanager
    def transaction(self, whole: Callable[[], Any]) -> Iterator[None]:
        """A transaction that may be undone, or kept and followed by death."""
        with whole():
            yield
            self.look()
        self.look()

    def look(self) -> None:
        """Ends the controller, or not."""
        if self._random.random() < self._chance:
            self.kill()

    def kill(self) -> None:
        """Ends the controller."""
        self.kills += 1
        raise Killed


def _arm(service: LiveService, reaper: Reaper) -> None:
    """Lets the reaper see what the present controller does."""
    engine, store = service.controller.context.engine, service.store
    for name in ("start", "post", "kill"):
        setattr(engine, name, reaper.wrap(getattr(engine, name)))
    whole = store.transaction
    store.transaction = lambda: reaper.transaction(whole)  # type: ignore[method-assign]


def _trained(root: Path, reaper: Reaper | None, monkeypatch: pytest.MonkeyPatch) -> LiveService:
    service = LiveService(root, gpus=2, checkpoint_every_s=5.0)
    if reaper is not None:
        monkeypatch.setattr(executor, "write_lease", reaper.wrap(executor.write_lease))
        _arm(service, reaper)
    for name, steps in JOBS.items():
        service.submit(name, steps=steps, batch=6)
    alive, end_s = True, service.now_s + 20_000
    while not service.is_over:
        assert service.now_s < end_s, f"all jobs must end, got {service.states()}"
        try:
            if not alive:
                service.now_s += 0.5
                service.restart()
                assert reaper is not None, "nobody else kills"
                _arm(service, reaper)
                alive = True
            service.run(60, until=lambda: service.is_over)
        except Killed:
            alive = False
    return service


def _adapters(service: LiveService) -> dict[str, str]:
    rows = service.store.jobs.page(limit=100)
    return {row.name: service.adapter(row.id) for row in rows}


def test_a_controller_is_killed_at_random_effects(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = _adapters(_trained(root / "quiet", None, monkeypatch))
    kills = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            reaper = Reaper(seed)
            service = _trained(root / str(seed), reaper, patch)
        assert set(service.states().values()) == {"finished"}, f"seed {seed}"
        assert _adapters(service) == undisturbed, f"seed {seed}"
        assert not service.engine.doubled, f"seed {seed}"
        check(service.store)
        kills += reaper.kills
    assert kills > len(SEEDS)
