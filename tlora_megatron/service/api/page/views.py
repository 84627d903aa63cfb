"""The views of machines, groups, jobs, decisions and the past, as plain values for one viewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tlora_megatron.service.api.page.facts import Facts, Viewer
from tlora_megatron.service.store import WHY_QUEUED, Decision, Gang, Job

View = dict[str, Any]


def cluster(facts: Facts, viewer: Viewer) -> View:
    """The machines: their GPUs, the gang that holds each, and which get no jobs."""
    board, figures = facts.board("cluster"), facts.board("figures")
    held = {place: gang.name for gang in facts.living for place in gang.spec.gpus}
    aside = {(one["node"], one["gpu"]): one["until"] for one in board.get("set_aside", ())}
    nodes = []
    for node in board.get("nodes", ()):
        number = node["node"]
        gpus = [
            {
                "gpu": gpu,
                "gang": held.get((number, gpu)),
                "set_aside_until": aside.get((number, gpu)),
            }
            for gpu in range(node["gpus"])
        ]
        host = {"host": node["host"]} if viewer.sees_all else {}
        nodes.append({"node": number, **host, "healthy": node["healthy"], "gpus": gpus})
    return {
        "served": facts.is_served,
        "policy": board.get("policy"),
        "gpus": {
            "all": sum(len(node["gpus"]) for node in nodes),
            "held": len(held),
            "used": figures.get("gpus_used", 0) if facts.living else 0,
        },
        "nodes": nodes,
    }


def groups(facts: Facts, viewer: Viewer) -> View:
    """The gangs: layout, members, speeds, and each member's slowdown against its bound."""
    shown = {
        (group["gang"], group["epoch"]): group for group in facts.board("groups").get("groups", ())
    }
    living = facts.living
    return {
        "groups": [
            _group(gang, shown.get((gang.name, gang.epoch), {}), facts, viewer) for gang in living
        ]
    }


def _group(gang: Gang, shown: Mapping[str, Any], facts: Facts, viewer: Viewer) -> View:
    members = [
        _member(member, facts.jobs.get(member["job"]), viewer)
        for member in shown.get("members", ())
    ]
    view = {
        "gang": gang.name,
        "epoch": gang.epoch,
        "state": str(gang.state),
        "since": gang.started_at,
        "gpus": [list(place) for place in gang.spec.gpus],
        "layout": shown.get("layout", {}),
        "predicted_tokens_per_s": shown.get("predicted_tokens_per_s"),
        "measured_tokens_per_s": shown.get("measured_tokens_per_s"),
        "correction": shown.get("correction"),
        "members": members,
    }
    if viewer.sees_all or any(member["own"] for member in members):
        # A job that must be alone has a pool of its own.
        key = str(gang.engine_ref.get("pool", "")).partition(" // ")[0]
        view["base"] = facts.base_name(key)
    return view


_MEMBER = (
    "phase",
    "driven",
    "bound",
    "predicted_tokens_per_s",
    "measured_tokens_per_s",
    "alone_tokens_per_s",
    "slowdown",
    "predicted_slowdown",
)
_PROGRESS = ("step", "num_steps", "tokens", "loss", "started_at")


def _member(member: Mapping[str, Any], row: Job | None, viewer: Viewer) -> View:
    named = viewer.name(member["job"], row)
    if row is None or not named["own"]:
        return {**named, "phase": member["phase"]}
    own = {name: member.get(name) for name in _MEMBER}
    return {**named, **own, "state": str(row.state), **{n: getattr(row, n) for n in _PROGRESS}}


def jobs(facts: Facts, viewer: Viewer) -> View:
    """The viewer's jobs that wait or have ended, and how many there are of all."""
    own, everybody = facts.counts.get(viewer.scope, {}), facts.counts.get(None, {})
    waiting = facts.waiting.get(viewer.scope, ())
    queued = sum(number for state, number in everybody.items() if state == "queued")
    return {
        "counts": {str(state): number for state, number in own.items()},
        "waiting": [_row(job, facts, viewer) for job in waiting],
        "queued_of_all": queued,
        "ended": [_row(job, facts, viewer) for job in facts.ended.get(viewer.scope, ())],
    }


_ROW = ("wish", "error", "submitted_at", "ended_at", *_PROGRESS)


def _row(job: Job, facts: Facts, viewer: Viewer) -> View:
    asked = job.schedule
    return {
        **viewer.name(job.id, job),
        "state": str(job.state),
        "base": facts.base_name(job.base),
        "gpus": asked.get("gpus", 1),
        "bound": asked.get("max_slowdown", 1.5),
        "priority": asked.get("priority", 0),
        "waits": facts.board(WHY_QUEUED).get(job.id) if job.state == "queued" else None,
        **{name: getattr(job, name) for name in _ROW},
    }


def timeline(facts: Facts, viewer: Viewer) -> View:
    """Which gang held which GPUs when, with which jobs."""
    stays: dict[tuple[str, int], list[View]] = {}
    for stay in facts.stays:
        named = viewer.name(stay.job, facts.jobs.get(stay.job))
        span = {**named, "since": stay.since, "until": stay.until}
        stays.setdefault((stay.gang, stay.gang_epoch), []).append(span)
    return {
        "gangs": [
            {
                "gang": gang.name,
                "epoch": gang.epoch,
                "gpus": [list(place) for place in gang.spec.gpus],
                "since": gang.started_at,
                "until": gang.ended_at,
                "jobs": stays.get((gang.name, gang.epoch), []),
            }
            for gang in facts.gangs
        ]
    }


def figures(facts: Facts, viewer: Viewer) -> View:
    """How long decisions, joins and starts take; nothing of any job."""
    return {"figures": dict(facts.board("figures"))}


def decision_page(
    found: Sequence[Decision], rows: Mapping[str, Job], viewer: Viewer, limit: int
) -> View:
    """Decisions newest first, with the jobs that each action concerns and its reason.

    A tenant is told of those that concern jobs of its own. `next` is the number before which there
    may be more; None where there is no more.
    """
    views = [_decision(one, rows, viewer) for one in found]
    shown = [view for view in views if viewer.sees_all or view["actions"]]
    return {"decisions": shown, "next": found[-1].seq if len(found) == limit else None}


def _decision(one: Decision, rows: Mapping[str, Job], viewer: Viewer) -> View:
    actions = [_action(action, rows, viewer) for action in one.actions]
    if not viewer.sees_all:
        actions = [action for action in actions if any(job["own"] for job in action["jobs"])]
    return {
        "seq": one.seq,
        "at": one.at,
        "why": one.why,
        "waiting": one.snapshot.get("waiting"),
        "held_back": list(one.snapshot.get("held_back", ())),
        "actions": actions,
    }


def _action(action: Mapping[str, Any], rows: Mapping[str, Job], viewer: Viewer) -> View:
    jobs = [viewer.name(job, rows.get(job)) for job in action.get("jobs", ())]
    slow, bounds = action.get("slowdowns", ()), action.get("bounds", ())
    for named, times, bound in zip(jobs, slow, bounds, strict=False):
        if named["own"]:
            named |= {"slowdown": times, "bound": bound}
    return {
        "kind": action.get("kind"),
        "gang": action.get("gang"),
        "num_gpus": len(action.get("gpus", ())),
        "why": action.get("why"),
        "tokens_per_s": action.get("tokens_per_s"),
        "in_turn_tokens_per_s": action.get("in_turn_tokens_per_s"),
        "jobs": jobs,
    }


def jobs_of(found: Iterable[Decision]) -> list[str]:
    """Ids of all jobs that some decisions concern."""
    ids = {job for one in found for action in one.actions for job in action.get("jobs", ())}
    return sorted(ids)


def sweeps(facts: Facts, viewer: Viewer) -> View:
    """The viewer's newest sweeps: which trials are before which rung, and what became of them."""
    return {
        "sweeps": [
            {"id": one.id, "name": one.name, "trials": len(one.trials), "stages": one.stages()}
            for one in facts.sweeps.get(viewer.scope, ())
        ]
    }


PARTS: Mapping[str, Callable[[Facts, Viewer], View]] = {
    "cluster": cluster,
    "groups": groups,
    "jobs": jobs,
    "sweeps": sweeps,
    "timeline": timeline,
    "figures": figures,
}
"""The parts of the page's stream, by the names of their events."""
