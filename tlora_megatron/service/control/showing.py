"""Writes what only the controller knows where others can read it: machines, groups, figures.

Each is a row of the store that is written over when it has changed, with the reports of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.scheduler.jobs import Group, Job
from tlora_megatron.service.control.books.live import LiveGang, LiveJob
from tlora_megatron.service.control.desk import Desk

Body = dict[str, Any]


class Showing:
    """Shows the books."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._shown: dict[str, Body] = {}

    def forget(self) -> None:
        """Shows all anew: nobody knows whether the last of it was kept."""
        self._shown.clear()

    def changed(self) -> dict[str, Body]:
        """Values that are not shown yet, by name."""
        now = {"cluster": self._cluster(), "groups": self._groups(), "figures": self._figures()}
        return {name: body for name, body in now.items() if body != self._shown.get(name)}

    def show(self, changed: Mapping[str, Body]) -> None:
        """Writes it, inside a transaction."""
        for name, body in changed.items():
            self._desk.store.boards.write(name, body)
        self._shown.update(changed)

    def _cluster(self) -> Body:
        books = self._desk.books
        machines, size = books.machines, books.machines.shape.gpus_per_node
        missing = [gpu // size for gpu in machines.missing]
        nodes = [
            {
                "node": node,
                "host": machines.hosts[node],
                "gpus": size - missing.count(node),
                "healthy": node not in machines.down,
            }
            for node in range(machines.shape.num_nodes)
        ]
        aside = [
            {"node": gpu // size, "gpu": gpu % size, "until": until_s}
            for gpu, until_s in sorted(books.set_aside.until_s.items())
        ]
        return {"policy": self._desk.settings.policy, "nodes": nodes, "set_aside": aside}

    def _groups(self) -> Body:
        books = self._desk.books
        decided = {name: books.fleet.state.groups[number] for number, name in books.names.items()}
        return {
            "groups": [
                self._group(gang, decided.get(gang.name)) for gang in list(books.gangs.values())
            ]
        }

    def _group(self, gang: LiveGang, group: Group | None) -> Body:
        jobs = dict.fromkeys(gang.seats)
        predicted: dict[str, float] = {}
        factor = None
        if group is not None:
            own = {self._desk.books.numbers[m.job.index].id: m for m in group.members}
            jobs |= dict.fromkeys(own)
            predicted = {job: m.tokens_per_s for job, m in own.items()}
            if any(member.job.is_open for member in group.members):
                predicted = {}
            factor = self._desk.pricing.speeds.factor(group.kinds, len(group.gpus))
        told = gang.told
        return {
            "gang": gang.name,
            "epoch": gang.epoch,
            "state": gang.state,
            "layout": _layout(gang.plan),
            "predicted_tokens_per_s": round(sum(predicted.values()), 1) or None,
            "measured_tokens_per_s": round(sum(told.values()), 1) if told else None,
            "correction": factor and round(factor, 3),
            "members": [
                self._member(gang, self._desk.books.jobs[job], predicted.get(job))
                for job in jobs
                if job in self._desk.books.jobs
            ],
        }

    def _member(self, gang: LiveGang, live: LiveJob, predicted: float | None) -> Body:
        seat, told = gang.seats.get(live.id), gang.told.get(live.id)
        steady = told if gang.told_steady else None
        shown: Body = {
            "job": live.id,
            "phase": "decided" if seat is None else seat.phase,
            "driven": live.is_open,
            "gpus": live.num_gpus,
            "measured_tokens_per_s": told and round(told, 1),
        }
        if live.is_open:  # its speed is its client's
            return shown
        return {
            **shown,
            "bound": live.max_slowdown,
            "predicted_tokens_per_s": predicted and round(predicted, 1),
            "alone_tokens_per_s": live.priced and round(live.priced.isolated_tokens_per_s, 1),
            "slowdown": _slowdown(live.priced, steady),
            "predicted_slowdown": _slowdown(live.priced, predicted),
        }

    def _figures(self) -> Body:
        desk, books = self._desk, self._desk.books
        gangs = list(books.gangs.values())
        used = [gang for gang in gangs if any(s.phase == "training" for s in gang.seats.values())]
        return {
            "waiting": len(books.queue),
            "gpus_held": sum(len(gang.gpus) for gang in gangs),
            "gpus_used": sum(len(gang.gpus) for gang in used),
            "held_back": list(desk.held_back),
            **{name: tally.to_dict() for name, tally in desk.tallies.items()},
        }


def _layout(plan: Plan | None) -> Body:
    if plan is None:
        return {}
    return {
        "tp": plan.tp_size,
        "pp": plan.pp_size,
        "dp": plan.dp_size,
        "sequence_parallel": plan.sequence_parallel,
        "micro_batch_tokens": plan.micro_batch_tokens,
    }


def _slowdown(job: Job | None, tokens_per_s: float | None) -> float | None:
    """How many times slower a job is than alone on the GPUs that it asks for."""
    if job is None or not tokens_per_s:
        return None
    return round(job.isolated_tokens_per_s / tokens_per_s, 3)
