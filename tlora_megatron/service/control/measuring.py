"""Takes in measurements of gangs: speeds for the scheduler, pauses of regroupings, slow-downs."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from tlora_megatron.service.control.books.live import LiveGang, LiveJob
from tlora_megatron.service.control.desk import Desk
from tlora_megatron.service.messages import GangEvent

_WEIGHT = 0.2
"""Weight of a new measurement in a running mean."""
_REPORTS = 20
"""Reports of a gang's speed among which a slow one is told."""
_SLOW = 0.5


class Measuring:
    """Takes up what is measured."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._touched: set[int] = set()

    def started(self, seconds: float) -> None:
        """Takes up how long a gang took to start: what a resize costs beside saving."""
        cost = self._desk.cost
        self._desk.cost = replace(cost, replan_s=_mean(cost.replan_s, seconds))
        self._desk.tallies["start"].add(seconds)

    def joined(self, stall_s: float) -> None:
        """Takes up how long the neighbours of a newcomer stood still."""
        cost = self._desk.cost
        self._desk.cost = replace(cost, admit_s=_mean(cost.admit_s, stall_s))
        self._desk.tallies["join"].add(stall_s)

    def touch(self, live: LiveJob) -> None:
        """Notes that a job's work left is known anew."""
        group = self._desk.books.fleet.group_of(live.number)
        if group is not None:
            self._touched.add(group.number)

    def refresh(self) -> None:
        """Brings the groups of which something new is known up to date."""
        books, now_s = self._desk.books, self._desk.clock()
        for number in self._touched:
            group = books.fleet.state.groups.get(number)
            if group is not None:
                books.refresh(group, now_s)
        self._touched.clear()

    def round(self, gang: LiveGang, event: GangEvent) -> None:
        """Takes up a gang's speed, if its members were the same all the time."""
        jobs = event.body.get("jobs", {})
        speed, total = float(event.body.get("tokens_per_s", 0.0)), int(event.body.get("rounds", 0))
        steady = not gang.changed and set(jobs) == _training(gang)
        rounds, gang.rounds, gang.changed = total - gang.rounds, total, False
        gang.told, gang.told_steady = {job: float(rate) for job, rate in jobs.items()}, steady
        known = self._desk.books.jobs
        steady = steady and not any(known[job].is_open for job in jobs if job in known)
        if not steady or rounds <= 0 or speed <= 0 or not gang.gpus:
            gang.speeds.clear()
            return
        self._watch(gang, speed)
        priced = [self._desk.books.jobs[job].priced for job in jobs]
        kinds = tuple(sorted(job.kind for job in priced if job is not None))
        if len(kinds) < len(jobs):
            return
        ratio = self._desk.pricing.speeds.measured(kinds, len(gang.gpus), speed, rounds)
        if ratio is not None:
            self._desk.say(
                "drift",
                f"gang {gang.name} trains {ratio:.2f} times as fast as predicted: the scheduler "
                "counts with that",
                gang=gang.name,
            )
            self._desk.books.reprice(self._desk.clock())
            self._desk.wants_decision = True

    def _watch(self, gang: LiveGang, speed: float) -> None:
        """Says once if a gang trains at less than half its usual speed for a while."""
        reports = gang.speeds
        reports.append(speed)
        if len(reports) < 2 * _REPORTS:
            return
        del reports[: -2 * _REPORTS]
        earlier = median(reports[:_REPORTS])
        if max(reports[_REPORTS:]) < _SLOW * earlier:
            is_left = self._desk.books.set_aside.put(gang.gpus, self._desk.clock())
            rest = "; when it leaves them they get no jobs for a day" if is_left else ""
            self._desk.say(
                "slow",
                f"gang {gang.name} trains at {speed:.0f} tokens/s, less than half of its usual "
                f"{earlier:.0f}: one of its GPUs may be failing{rest}",
                gang=gang.name,
            )
            reports.clear()


def _training(gang: LiveGang) -> set[str]:
    return {job for job, seat in gang.seats.items() if seat.phase == "training"}


def _mean(known: float, seconds: float) -> float:
    return known + _WEIGHT * (seconds - known)
