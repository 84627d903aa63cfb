"""GPUs on which gangs die or slow down get no jobs for a day; tenants hold their quota."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fake_gang import FakeGang
from tests.helpers.live_service import LiveService
from tlora_megatron.scheduler.cluster import ClusterShape, FreeGpus
from tlora_megatron.service.control.machines import DAY_S, SetAside
from tlora_megatron.service.store import JobState, TenantLimits


def _free() -> FreeGpus:
    return FreeGpus.all_of(ClusterShape(num_nodes=2, gpus_per_node=4, nodes_per_rack=2))


def test_two_deaths_in_a_day_set_a_gpu_aside_until_the_next_day() -> None:
    free = _free()
    aside = SetAside(free)
    assert not aside.died(5, 0.0)
    assert not aside.died(5, DAY_S)
    assert aside.died(5, DAY_S + 1)
    assert not aside.sweep(DAY_S + 2)
    assert free.in_node(1) == (4, 6, 7)
    assert aside.sweep(2 * DAY_S + 1)
    assert free.num == 8


def test_a_gpu_that_is_held_is_taken_when_it_is_given_back() -> None:
    free = _free()
    aside = SetAside(free)
    free.take([0, 1])
    assert aside.put([0, 1], 0.0)
    aside.sweep(1.0)
    free.give([0, 1])
    aside.sweep(2.0)
    assert free.in_node(0) == (2, 3)


def test_a_quarter_of_the_cluster_is_the_most() -> None:
    aside = SetAside(_free())
    assert not aside.put([0, 1, 2], 0.0)
    assert aside.put([0, 1], 0.0)
    assert not aside.put([2], 0.0)


def _gang(service: LiveService) -> FakeGang:
    return next(gang for gang in service.engine.all_gangs.values() if gang.alive)


@pytest.mark.parametrize("restarts", [False, True])
def test_jobs_go_on_elsewhere_after_two_deaths_at_a_gpu(root: Path, restarts: bool) -> None:
    service = LiveService(root, nodes=4)
    service.submit("one", steps=60)
    service.run(10)
    first = _gang(service).spec.gpus
    _gang(service).die("CUDA error: uncorrectable ECC error encountered")
    service.run(10)
    assert _gang(service).spec.gpus == first
    if restarts:
        service.restart()
    _gang(service).die("CUDA error: uncorrectable ECC error encountered")
    service.run(20)
    assert _gang(service).spec.gpus != first
    assert "gets no jobs for a day" in service.sentences("quarantined")[0]
    service.run()
    assert service.states() == {"one": "finished"}


def test_the_gpus_of_a_slow_gang_get_no_new_one(root: Path) -> None:
    service = LiveService(root, nodes=4)
    one = service.submit("one", steps=300)
    service.run(100)
    slow = _gang(service)
    for own in slow.jobs.values():
        own.tokens_per_s *= 0.1
    service.run(60)
    assert "they get no jobs for a day" in service.sentences("slow")[0]
    assert service.job(one).state == "running"
    service.store.jobs.request_action(one, "cancel")
    service.run(5)
    two = service.submit("two", steps=30)
    service.run(10)
    gang = service.store.gangs.get(str(service.job(two).gang), 1)
    assert slow.alive
    assert gang.spec.gpus != slow.spec.gpus


def test_a_job_on_its_way_waits_again_when_its_new_place_is_given_up(root: Path) -> None:
    service = LiveService(root)
    job = service.submit("one", steps=60)
    service.run(10)
    context = service.controller.context
    live = context.state.jobs[job]
    context.change(live, JobState.MOVING)
    for gang in context.state.gangs.values():
        gang.members.clear()
    context.requeue(live, why="its new gang died")
    assert live.number in context.state.queue
    assert (service.job(job).state, service.job(job).lease) == ("queued", None)


def test_a_tenant_s_jobs_hold_no_more_gpus_than_its_quota(root: Path) -> None:
    service = LiveService(root, gpus=2, policy="isolated")
    service.store.tenants.set_limits("local", TenantLimits(gpus=1))
    for name in "ab":
        service.submit(name, steps=200)
    service.run(20)
    assert sorted(service.states().values()) == ["queued", "running"]
    service.store.tenants.set_limits("local", TenantLimits(gpus=2))
    service.run(20)
    assert set(service.states().values()) == {"running"}
    service.store.tenants.set_limits("local", TenantLimits(gpus=1))
    service.restart()
    service.run(5)
    assert set(service.states().values()) == {"running"}, "a smaller quota ends nothing"
    service.run()
