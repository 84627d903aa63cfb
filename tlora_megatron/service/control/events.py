"""Applies the events of gangs to store and state; each counts once, whatever is killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from tlora_megatron.files import read_json
from tlora_megatron.service.control.context import Context
from tlora_megatron.service.control.deaths import died, saved_alone
from tlora_megatron.service.control.records import LiveGang, LiveJob
from tlora_megatron.service.messages import UNSTORED_SEQ, GangEvent
from tlora_megatron.service.store import GangState, JobState, Progress
from tlora_megatron.service.sweeps import settle, sweep_of

_Handler = Callable[["EventHandler", LiveGang, GangEvent], None]
_JobHandler = Callable[["EventHandler", LiveGang, LiveJob, GangEvent], None]
_WEIGHT = 0.2
"""Weight of a new measurement in a running mean."""
_REPORTS = 20
"""Reports of a gang's speed among which a slow one is reported."""
_SLOW = 0.5


class EventHandler:
    """Applies events, each by its kind."""

    def __init__(self, context: Context, measurements: Measurements) -> None:
        self._context = context
        self._measurements = measurements

    def apply(self, events: Sequence[GangEvent]) -> Mapping[str, str]:
        """Applies events in one transaction; returns what came instead in gangs with a gap."""
        if not events:
            return {}
        with self._context.store.transaction():
            taken = self._context.store.gangs.hear(events)
            for event in taken.new:
                self._apply(event)
        return {gang: what for (gang, _), what in taken.missed.items()}

    def _apply(self, event: GangEvent) -> None:
        gang = self._context.state.gangs.get(event.gang)
        if gang is None or gang.epoch != event.epoch:
            return
        gang.last_event = event.number
        gang.last_event_s = max(gang.last_event_s, self._context.clock())
        if event.kind in self._OF_GANGS:
            self._OF_GANGS[event.kind](self, gang, event)
            return
        live = self._context.state.jobs.get(event.job or "")
        if live is not None and live.id in gang.members:
            self._OF_JOBS[event.kind](self, gang, live, event)

    # Events of gangs

    def _started(self, gang: LiveGang, event: GangEvent) -> None:
        if gang.state != "starting":
            return
        context = self._context
        context.store.gangs.change(gang.name, gang.epoch, GangState.RUNNING)
        now_s = context.clock()
        self._measurements.started(now_s - gang.since_s)
        gang.state, gang.since_s, gang.idle_since_s = "running", now_s, now_s
        gang.is_fresh = True
        context.wants_actions = True

    def _round(self, gang: LiveGang, event: GangEvent) -> None:
        if not gang.changed:
            gang.in_first_round.clear()
        for job in gang.members:
            live = self._context.state.jobs[job]
            if live.is_open and live.deaths:  # its client may not step for long
                live.deaths = 0
                self._context.remember(live)
        self._measurements.round(gang, event)
        self._context.wants_actions = True

    def _applied(self, gang: LiveGang, event: GangEvent) -> None:
        seq = int(event.body["seq"])
        if 0 < seq < UNSTORED_SEQ:
            self._context.store.commands.mark_applied(gang.name, gang.epoch, seq)

    def _stopped(self, gang: LiveGang, event: GangEvent) -> None:
        self._context.gang_ended(gang, why="stopped as asked", in_order=True)

    def _died(self, gang: LiveGang, event: GangEvent) -> None:
        died(self._context, gang, event.body)

    def _note(self, gang: LiveGang, event: GangEvent) -> None:
        message = str(event.body.get("message", ""))
        self._context.say("note", message, job=event.job, gang=gang.name)

    # Events of jobs in gangs

    def _prepared(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        member = gang.members[live.id]
        if member.phase != "preparing":
            return
        member.phase = "prepared"
        gang.gather(self._context.clock())
        live.num_steps = int(event.body.get("num_steps", live.num_steps))
        body = {"phase": "prepared", "epoch": gang.epoch, **event.body}
        self._context.store.events.add("seat", job=live.id, gang=gang.name, body=body)
        self._context.wants_actions = True

    def _refused(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._leave(gang, live)
        self._context.fail(live, str(event.body.get("error", "the gang gave no reason")))

    def _joined(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        member = gang.members[live.id]
        if member.phase != "joining":
            return
        member.phase = "training"
        gang.joined()
        if not live.is_open:  # its first round may be hours away
            gang.in_first_round.add(live.id)
        gang.changed = True
        from_step = int(event.body.get("from_step", live.step))
        if not live.is_open and live.step:
            live.trained_tokens *= from_step / live.step
        live.step = from_step
        self._context.change(live, JobState.RUNNING, body=dict(event.body))
        self._measurements.joined(float(event.body.get("stall_s", 0.0)))
        self._context.wants_actions = True

    def _stepped(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        body = event.body
        live.step = int(body["step"])
        live.kills = 0
        if live.deaths:
            live.deaths = 0
            self._context.remember(live)
        gang.in_first_round.discard(live.id)
        self._measurements.touch(live)
        loss = body.get("loss")
        live.trained_tokens += float(body.get("tokens", 0))
        self._context.progress[live.id] = Progress(
            job=live.id,
            step=live.step,
            tokens=round(live.trained_tokens),
            loss=None if loss is None else float(loss),
            num_steps=live.num_steps,
        )

    def _evaluated(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._context.store.events.add(
            "evaluated", job=live.id, gang=gang.name, body=dict(event.body)
        )

    def _at_rung(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        """Pauses a trial; if it is the last one to come, the rung is decided."""
        found = None if live.sweep is None else sweep_of(self._context.store, live.sweep)
        if found is None:
            return
        live.step = int(event.body["step"])
        if live.step in found.open_rungs(live.name)[:1]:
            score = event.body["scores"].get(found.sweep.spec.metric)
            settle(self._context.store, found, {live.name: math.nan if score is None else score})
        self._context.store.jobs.request_actions([live.id], "pause", by=f"sweep {found.name}")
        self._context.unsettled.add(live.sweep or "")

    def _saved(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._context.store.events.add("saved", job=live.id, gang=gang.name, body=dict(event.body))
        if live.failed_saves:
            live.failed_saves = 0
            self._context.remember(live)
        if live.trial_saves:
            saved_alone(self._context, live)
        elif live.was_tried and len(gang.members) > 1:
            live.was_tried = False
            self._context.remember(live)

    def _not_saved(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        context = self._context
        if event.at < context.well_since_s:  # of a disk that may have room again; its log has it
            return
        live.failed_saves += 1
        context.remember(live)
        error = event.body.get("error", "the disk refused")
        message = f"job {live.name!r} could not be saved at step {event.body.get('step')}: {error}"
        if live.failed_saves < context.settings.max_failed_saves or live.requested is not None:
            context.say("not_saved", f"{message}; it trains on", job=live.id, gang=gang.name)
            return
        message += "; it is paused: make room and resume it"
        context.say("not_saved", message, job=live.id, gang=gang.name)
        live.requested = context.store.jobs.request_action(live.id, "pause", by="controller").wish
        context.state.withdraw(live, context.clock())
        context.wants_actions = True

    def _left(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._leave(gang, live)
        lost = bool(event.body.get("lost"))
        live.step = int(event.body.get("step", live.step))
        self._context.progress.pop(live.id, None)
        if live.saves_soon and not lost:
            live.saves_soon = False
            self._context.remember(live)
        self._context.store.jobs.update(live.id, step=live.step)
        self._context.state.saved(live)
        self._context.note_pause(live)
        self._context.vacate(live, why="lost its lease" if lost else "left its gang")

    def _ended(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._leave(gang, live)
        reason = event.body.get("reason")
        finished = event.body.get("status") == "finished"
        to = JobState.FINISHED if finished else JobState.FAILED
        why = "its last step is done" if finished else str(reason or "it failed by itself")
        step = int(event.body.get("step", live.step))
        if (report := self._context.progress.pop(live.id, None)) is not None:
            self._context.store.jobs.progress([report])
        self._context.change(
            live,
            to,
            release=why,
            why=why,
            step=step,
            tokens=self._trained_tokens(live),
            error=None if finished else why,
        )
        if not finished:
            self._context.on_said(f"job {live.name!r} failed at step {step}: {why}")

    def _trained_tokens(self, live: LiveJob) -> int:
        """What a job that has ended has trained, by its own count."""
        try:
            summary = self._context.home.job(live.id) / "summary.json"
            return int(read_json(summary)["tokens"])
        except (OSError, ValueError, TypeError, KeyError):
            return round(live.trained_tokens)

    def _leave(self, gang: LiveGang, live: LiveJob) -> None:
        del gang.members[live.id]
        gang.in_first_round.discard(live.id)
        gang.changed = True
        if not gang.members:
            gang.idle_since_s = self._context.clock()
        self._context.wants_actions = True

    _OF_GANGS: Mapping[str, _Handler] = {
        "started": _started,
        "round": _round,
        "applied": _applied,
        "stopped": _stopped,
        "died": _died,
        "note": _note,
    }
    _OF_JOBS: Mapping[str, _JobHandler] = {
        "prepared": _prepared,
        "refused": _refused,
        "joined": _joined,
        "stepped": _stepped,
        "evaluated": _evaluated,
        "at_rung": _at_rung,
        "saved": _saved,
        "not_saved": _not_saved,
        "left": _left,
        "ended": _ended,
    }


class Measurements:
    """Takes up what is measured."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._touched: set[int] = set()

    def started(self, seconds: float) -> None:
        """Takes up how long a gang took to start: what a resize costs beside saving."""
        cost = self._context.cost
        self._context.cost = replace(cost, replan_s=_mean(cost.replan_s, seconds))
        self._context.tallies["start"].add(seconds)

    def joined(self, stall_s: float) -> None:
        """Takes up how long co-trained jobs stood still while one joined."""
        cost = self._context.cost
        self._context.cost = replace(cost, admit_s=_mean(cost.admit_s, stall_s))
        self._context.tallies["join"].add(stall_s)

    def touch(self, live: LiveJob) -> None:
        """Notes that a job has reported how much work is left."""
        group = self._context.state.fleet.group_of(live.number)
        if group is not None:
            self._touched.add(group.number)

    def refresh(self) -> None:
        """Brings the groups of which something new is known up to date."""
        state, now_s = self._context.state, self._context.clock()
        for number in self._touched:
            group = state.fleet.cluster.groups.get(number)
            if group is not None:
                state.refresh(group, now_s)
        self._touched.clear()

    def round(self, gang: LiveGang, event: GangEvent) -> None:
        """Takes up a gang's speed, if its members were the same all the time."""
        jobs = event.body.get("jobs", {})
        speed, total = float(event.body.get("tokens_per_s", 0.0)), int(event.body.get("rounds", 0))
        training = {job for job, member in gang.members.items() if member.phase == "training"}
        steady = not gang.changed and set(jobs) == training
        rounds, gang.rounds, gang.changed = total - gang.rounds, total, False
        gang.reported = {job: float(rate) for job, rate in jobs.items()}
        gang.reported_steady = steady
        known = self._context.state.jobs
        steady = steady and not any(known[job].is_open for job in jobs if job in known)
        if not steady or rounds <= 0 or speed <= 0 or not gang.gpus:
            gang.speeds.clear()
            return
        self._watch(gang, speed)
        priced = [self._context.state.jobs[job].priced for job in jobs]
        kinds = tuple(sorted(job.kind for job in priced if job is not None))
        if len(kinds) < len(jobs):
            return
        ratio = self._context.pricing.speeds.measured(kinds, len(gang.gpus), speed, rounds)
        if ratio is not None:
            self._context.say(
                "drift",
                f"gang {gang.name} trains {ratio:.2f} times as fast as predicted: the scheduler "
                "counts with that",
                gang=gang.name,
            )
            self._context.state.reprice(self._context.clock())
            self._context.wants_decision = True

    def _watch(self, gang: LiveGang, speed: float) -> None:
        """Says once if a gang trains at less than half its usual speed for a while."""
        reports = gang.speeds
        reports.append(speed)
        if len(reports) < 2 * _REPORTS:
            return
        del reports[: -2 * _REPORTS]
        earlier = median(reports[:_REPORTS])
        if max(reports[_REPORTS:]) < _SLOW * earlier:
            is_left = self._context.state.set_aside.put(gang.gpus, self._context.clock())
            rest = "; when it leaves them they get no jobs for a day" if is_left else ""
            self._context.say(
                "slow",
                f"gang {gang.name} trains at {speed:.0f} tokens/s, less than half of its usual "
                f"{earlier:.0f}: one of its GPUs may be failing{rest}",
                gang=gang.name,
            )
            reports.clear()


def _mean(known: float, seconds: float) -> float:
    return known + _WEIGHT * (seconds - known)
