"""GPUs that are set aside, quotas of tenants, and the policy `tlora_elastic` in a controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.live_service import LiveService, one_job
from tlora_megatron.scheduler.policy import ClusterShape, Decision, FreeGpus
from tlora_megatron.scheduler.queue import Pause
from tlora_megatron.service.control.pricing import DAY_S, SetAside
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


@pytest.mark.parametrize("restarts", [False, True])
def test_jobs_go_on_elsewhere_after_two_deaths_at_a_gpu(root: Path, restarts: bool) -> None:
    service, _ = one_job(root, nodes=4)
    first = service.gang.spec.gpus
    service.gang.die("CUDA error: uncorrectable ECC error encountered")
    service.run(10)
    assert service.gang.spec.gpus == first
    if restarts:
        service.restart()
    service.gang.die("CUDA error: uncorrectable ECC error encountered")
    service.run(20)
    assert service.gang.spec.gpus != first
    assert "gets no jobs for a day" in service.sentences("quarantined")[0]
    service.run()
    assert service.states() == {"one": "finished"}


def test_the_gpus_of_a_slow_gang_get_no_new_one(root: Path) -> None:
    service, one = one_job(root, steps=300, run_s=100, nodes=4)
    slow = service.gang
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
    service, job = one_job(root)
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


@pytest.fixture
def service(root: Path) -> LiveService:
    """A long job that is paused, and a short one that trains in its place."""
    service = LiveService(root, policy="tlora_elastic")
    service.submit("long", steps=1000, batch=10, max_slowdown=1.9)
    service.run(20)
    service.submit("short", steps=30, batch=10, max_slowdown=1.9)
    service.run(10)
    assert service.states() == {"long": "queued", "short": "running"}
    return service


def _held(service: LiveService) -> int:
    return service.controller.context.state.fleet.cluster.tenant_gpus.get("local", 0)


def _pauses(service: LiveService) -> list[Pause | None]:
    return [waiting.pause for waiting in service.controller.context.state.queue.paused()]


def _steps_left(service: LiveService) -> float:
    (waiting,) = service.controller.context.state.queue.paused()
    return waiting.tokens_left / waiting.job.tokens * 1000


def test_who_is_paused_comes_back_even_if_its_bound_is_lost(service: LiveService) -> None:
    assert _held(service) == 2, "it is charged while it is paused"
    service.now_s += 3000  # a thousand more than its bound allows
    service.run(10)
    assert service.states() == {"long": "running", "short": "finished"}
    assert _held(service) == 1
    service.run()
    assert _held(service) == 0


def test_a_pause_outlives_controllers_but_no_job(service: LiveService) -> None:
    (pause,) = _pauses(service)
    assert pause is not None
    service.restart()
    assert _pauses(service) == [pause], "GPUs are kept for it, under the bound that it had"
    assert _held(service) == 2
    service.run(60)
    assert service.states() == {"long": "running", "short": "finished"}
    assert _held(service) == 1
    (group,) = service.controller.context.state.fleet.cluster.groups.values()
    (member,) = group.members
    assert (member.started_s, member.deadline_s) == (pause.started_s, pause.deadline_s)
    assert member.deadline_s == pytest.approx(member.job.submit_s + 1.9 * member.job.isolated_s)
    service.restart()
    assert _pauses(service) == []
    (group,) = service.controller.context.state.fleet.cluster.groups.values()
    assert group.members[0].deadline_s == pytest.approx(pause.deadline_s), "nor does its bound"


def test_what_is_left_of_a_paused_job_is_what_its_checkpoint_says(service: LiveService) -> None:
    job = service.store.jobs.find("long", tenant="local").id
    events = [event for gang in service.engine.all_gangs.values() for event in gang.events]
    (saved,) = [event.body["step"] for event in events if event.kind == "left"]
    assert saved > 5
    assert _steps_left(service) == pytest.approx(1000 - saved), "and no estimate"
    service.restart()
    assert _steps_left(service) == pytest.approx(1000 - saved)
    assert service.job(job).step == saved


def test_a_decision_says_who_waits_for_shorter_work(service: LiveService) -> None:
    (last, *_) = service.store.decisions.newest()
    long = service.store.jobs.find("long", tenant="local").id
    pause, start = last.actions
    assert (pause["kind"], pause["jobs"], pause["gpus"]) == ("pause", [long], start["gpus"])
    assert pause["why"].startswith("1 job on 1 GPU waits for shorter work")


def test_who_is_cancelled_in_its_pause_is_charged_no_more(service: LiveService) -> None:
    service.store.jobs.request_action(service.store.jobs.find("long", tenant="local").id, "cancel")
    service.run()
    assert service.states() == {"long": "cancelled", "short": "finished"}
    assert _held(service) == 0


def test_a_decision_for_which_memory_is_gone_meanwhile_is_refused(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = LiveService(root, policy="mlora")
    service.submit("first", steps=100)
    service.run(10)
    service.submit("second", steps=10)
    decider, speeds = service.controller.decider, service.controller.context.pricing.speeds
    answer = decider._answer

    def forgetful(question: Any) -> list[Decision]:
        decisions = answer(question)
        speeds._scaled.update(dict.fromkeys([mix for mix in speeds._scaled if len(mix[0]) > 1]))
        return decisions

    decider._answer = forgetful  # type: ignore[method-assign]
    service.run(5)
    assert service.states() == {"first": "running", "second": "queued"}
    assert "a decision is not carried out" in caplog.text
    assert not any("do not balance" in said for said in service.said)
