"""Jobs that a decision has paused: their right to come back, as the store keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Pause, Waiting
from tlora_megatron.service.control.books.machines import Machines


def pause_to_json(pause: Pause, machines: Machines) -> dict[str, Any]:
    """The form in which a job's row keeps its pause; GPUs by machine, since numbers may change."""
    return {
        "places": [list(place) for place in machines.places(pause.gpus)],
        "back_by_s": pause.back_by_s,
        "started_s": pause.started_s,
        "deadline_s": pause.deadline_s,
    }


def pause_from_json(kept: Mapping[str, Any], machines: Machines) -> Pause | None:
    """The pause of a job's row; None if some of its GPUs are gone."""
    places = [(int(node), int(gpu)) for node, gpu in kept["places"]]
    if not machines.has(places):
        return None
    return Pause(
        gpus=machines.numbers(places),
        back_by_s=float(kept["back_by_s"]),
        started_s=float(kept["started_s"]),
        deadline_s=float(kept["deadline_s"]),
    )


def with_left(waiting: Waiting, tokens_left: float, speeds: Speeds) -> Waiting:
    """A paused job whose work left is known anew: it must come back the sooner, the more it is."""
    pause = waiting.pause
    assert pause is not None, "only a paused job has a time to come back by"
    rates = speeds.rates((waiting.job.kind,), len(pause.gpus))
    later_s = 0.0 if rates is None else (tokens_left - waiting.tokens_left) / rates.total
    pause = replace(pause, back_by_s=pause.back_by_s - later_s)
    return replace(waiting, tokens_left=tokens_left, pause=pause)
