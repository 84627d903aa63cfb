"""A controller with the policy `tlora_elastic`: who is paused comes back once, whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.live_service import LiveService
from tlora_megatron.scheduler.policy import Decision
from tlora_megatron.scheduler.queue import Pause


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
