"""Applies what gangs tell to store and books; each event counts once, wherever one is killed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tlora_megatron.service.control.books.live import LiveGang, LiveJob, Seat
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.control.faults.deaths import died
from tlora_megatron.service.control.measuring import Measuring
from tlora_megatron.service.messages import GangEvent
from tlora_megatron.service.store import GangState, JobState, Progress

_Handler = Callable[["Hearing", LiveGang, GangEvent], None]
_JobHandler = Callable[["Hearing", LiveGang, LiveJob, GangEvent], None]


class Hearing:
    """Hears the events of gangs."""

    def __init__(self, desk: Desk, measuring: Measuring) -> None:
        self._desk = desk
        self._measuring = measuring

    def hear(self, events: Sequence[GangEvent]) -> Mapping[str, str]:
        """Applies events in one transaction.

        Returns:
            Gangs whose words have a gap, and what they told; nothing more is heard of them.
        """
        if not events:
            return {}
        with self._desk.store.transaction():
            heard = self._desk.store.gangs.hear(events)
            for event in heard.new:
                self._hear(event)
        return {gang: what for (gang, _), what in heard.missed.items()}

    def _hear(self, event: GangEvent) -> None:
        gang = self._desk.books.gangs.get(event.gang)
        if gang is None or gang.epoch != event.epoch:
            return
        gang.heard = event.number
        gang.heard_s = max(gang.heard_s, self._desk.clock())
        if event.kind in self._OF_GANGS:
            self._OF_GANGS[event.kind](self, gang, event)
            return
        live = self._desk.books.jobs.get(event.job or "")
        if live is not None and live.id in gang.seats:
            self._OF_JOBS[event.kind](self, gang, live, event)

    # What gangs tell of themselves

    def _started(self, gang: LiveGang, event: GangEvent) -> None:
        if gang.state != "starting":
            return
        desk = self._desk
        desk.store.gangs.change(gang.name, gang.epoch, GangState.RUNNING)
        now_s = desk.clock()
        self._measuring.started(now_s - gang.since_s)
        gang.state, gang.since_s, gang.idle_since_s = "running", now_s, now_s
        gang.is_fresh = True
        desk.wants_actions = True

    def _round(self, gang: LiveGang, event: GangEvent) -> None:
        if not gang.changed:
            gang.in_first_round.clear()
        for job in gang.seats:
            self._is_well(self._desk.books.jobs[job])
        self._measuring.round(gang, event)
        self._desk.wants_actions = True

    def _is_well(self, live: LiveJob) -> None:
        """Forgets the deaths of gangs that a job was in whose client may not step for long."""
        if live.is_open and live.deaths:
            live.deaths = 0
            self._desk.remember(live)

    def _applied(self, gang: LiveGang, event: GangEvent) -> None:
        self._desk.store.commands.mark_applied(gang.name, gang.epoch, int(event.body["seq"]))

    def _stopped(self, gang: LiveGang, event: GangEvent) -> None:
        self._desk.gone(gang, why="stopped as asked")

    def _died(self, gang: LiveGang, event: GangEvent) -> None:
        died(self._desk, gang, event.body)

    def _note(self, gang: LiveGang, event: GangEvent) -> None:
        message = str(event.body.get("message", ""))
        self._desk.say("note", message, job=event.job, gang=gang.name)

    # What they tell of a job

    def _prepared(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        seat = gang.seats[live.id]
        if seat.phase != "preparing":
            return
        seat.phase = "prepared"
        gang.gather(self._desk.clock())
        live.num_steps = int(event.body.get("num_steps", live.num_steps))
        body = {"phase": "prepared", "epoch": gang.epoch, **event.body}
        self._desk.store.events.add("seat", job=live.id, gang=gang.name, body=body)
        self._desk.wants_actions = True

    def _refused(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._leave(gang, live)
        self._desk.fail(live, str(event.body.get("error", "the gang gave no reason")))

    def _joined(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        seat = gang.seats[live.id]
        if seat.phase != "joining":
            return
        seat.phase = "training"
        gang.joined()
        if not live.is_open:  # its first round may be hours away
            gang.in_first_round.add(live.id)
        gang.changed = True
        live.step = int(event.body.get("from_step", live.step))
        self._desk.change(live, JobState.RUNNING, body=dict(event.body))
        self._measuring.joined(float(event.body.get("stall_s", 0.0)))
        self._desk.wants_actions = True

    def _stepped(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        body = event.body
        live.step = int(body["step"])
        if live.deaths:
            live.deaths = 0
            self._desk.remember(live)
        gang.in_first_round.discard(live.id)
        self._measuring.touch(live)
        loss = body.get("loss")
        if live.is_open:
            live.tokens += float(body.get("tokens", 0))
        self._desk.progress[live.id] = Progress(
            job=live.id,
            step=live.step,
            tokens=int(live.tokens if live.is_open else live.tokens * (1 - live.share_left)),
            loss=None if loss is None else float(loss),
            num_steps=live.num_steps,
        )

    def _evaluated(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._desk.store.events.add("evaluated", job=live.id, gang=gang.name, body=dict(event.body))

    def _saved(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        if live.failed_saves:
            live.failed_saves = 0
            self._desk.remember(live)

    def _not_saved(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        desk = self._desk
        live.failed_saves += 1
        desk.remember(live)
        error = event.body.get("error", "the disk refused")
        message = f"job {live.name!r} could not be saved at step {event.body.get('step')}: {error}"
        if live.failed_saves < desk.settings.max_failed_saves or live.wish is not None:
            desk.say("not_saved", f"{message}; it trains on", job=live.id, gang=gang.name)
            return
        message += "; it is paused: make room and resume it"
        desk.say("not_saved", message, job=live.id, gang=gang.name)
        live.wish = desk.store.jobs.wish(live.id, "pause", by="controller").wish
        desk.books.withdraw(live, desk.clock())
        desk.wants_actions = True

    def _left(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._leave(gang, live)
        lost = bool(event.body.get("lost"))
        live.step = int(event.body.get("step", live.step))
        self._desk.progress.pop(live.id, None)
        self._desk.store.jobs.update(live.id, step=live.step)
        self._desk.books.saved(live)
        self._desk.note_pause(live)
        self._desk.vacate(live, why="lost its lease" if lost else "left its gang")

    def _ended(self, gang: LiveGang, live: LiveJob, event: GangEvent) -> None:
        self._leave(gang, live)
        reason = event.body.get("reason")
        finished = event.body.get("status") == "finished"
        to = JobState.FINISHED if finished else JobState.FAILED
        why = "its last step is done" if finished else str(reason or "it failed by itself")
        step = int(event.body.get("step", live.step))
        if (report := self._desk.progress.pop(live.id, None)) is not None:
            self._desk.store.jobs.progress([report])
        self._desk.change(
            live, to, release=why, why=why, step=step, error=None if finished else why
        )
        if not finished:
            self._desk.on_said(f"job {live.name!r} failed at step {step}: {why}")

    def _leave(self, gang: LiveGang, live: LiveJob) -> Seat:
        seat = gang.seats.pop(live.id)
        gang.in_first_round.discard(live.id)
        gang.changed = True
        if not gang.seats:
            gang.idle_since_s = self._desk.clock()
        self._desk.wants_actions = True
        return seat

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
        "saved": _saved,
        "not_saved": _not_saved,
        "left": _left,
        "ended": _ended,
    }
