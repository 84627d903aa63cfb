"""How a gang has ended: which rank is to blame, what it has to say, and the gang's last event."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from tlora_megatron.runtime.ranks import describe_death
from tlora_megatron.service.gang_folder import GangFolder
from tlora_megatron.service.messages import GangEvent
from tlora_megatron.service.supervisor import last_words

_SENT = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that somebody sends; others come from what a process did itself."""


def blame(folder: GangFolder, codes: Mapping[int, int | None]) -> dict[str, Any]:
    """The body of `died` for ranks that are gone, with their exit codes where they are known.

    Ranks that only lost their connection to another one are not to blame while there is one that
    did not; one that could not say anything comes before those that have.
    """
    endings = {rank: _ending(folder, rank, code) for rank, code in codes.items()}
    rank, ending = min(
        endings.items(), key=lambda item: (item[1]["is_lost"], item[1]["at"], item[0])
    )
    words = {key: ending[key] for key in ("reason", "out_of_memory", "newcomers")}
    if ending.get("was_killed"):
        words["was_killed"] = True
    return {"rank": rank, **words}


def say_died(folder: GangFolder, body: Mapping[str, Any]) -> None:
    """Writes a gang's last event in its place, unless it has said goodbye itself.

    None of its processes may be left.
    """
    log = folder.events()
    last = log.last()
    if last is not None and last.kind in ("died", "stopped"):
        return
    newcomers = body.get("newcomers", [])
    event = GangEvent(
        gang=folder.gang,
        epoch=folder.epoch,
        number=last.number + 1 if last else 1,
        at=time.time(),
        kind="died",
        job=newcomers[0] if len(newcomers) == 1 else None,
        body={"out_of_memory": False, "newcomers": [], **body},
    )
    log.append(event, durable=True)


def _ending(folder: GangFolder, rank: int, code: int | None) -> dict[str, Any]:
    own = folder.read_json(f"end_{rank}.json")
    if own is not None:
        return dict(own)
    reason = _describe(folder, rank, code)
    return {
        "reason": reason,
        "out_of_memory": False,
        "newcomers": [],
        "is_lost": code == 0,
        "was_killed": code is None or -code in _SENT,
        "at": 0.0,
    }


def _describe(folder: GangFolder, rank: int, code: int | None) -> str:
    if code is not None and code < 0:
        text = describe_death(rank, -code)
    elif code is None:
        text = f"rank {rank} has ended without a word, as SIGKILL ends processes"
    else:
        text = f"rank {rank} ended with exit code {code}"
    last = last_words(folder.log(rank))
    return f"{text}; the last line of its log: {last}" if last else text
