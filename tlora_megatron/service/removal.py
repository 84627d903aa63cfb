"""Asks something of many jobs, each on its own; takes away jobs that have ended, and their files.

A job is first taken out of all lists, in the store; then its folder gets another name and is
deleted. Killed at any moment, either the job is there as a whole, or `tidy` deletes what is left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlora_megatron.config.job_rows import OVER, Acted, Action
from tlora_megatron.service.home import Home
from tlora_megatron.service.prepare.submission import ORDER
from tlora_megatron.service.store import Job, Store

_CHECKPOINTS = "checkpoints"
"""In a job's folder: states from which it can go on, three times as large as its adapter."""
_AT_ONCE = 1000
"""Jobs of a transaction, for 0.1 s: others wait meanwhile."""
_JOB_ID = re.compile(r"\bj\d+[a-z]{4}\b")
_LOG_BYTES = 64 << 20
_DAY_S = 86_400.0
_SHARE = 0.25
"""Of the time for which a job is kept, checkpoints are kept for so much."""


def act_on(home: Home, store: Store, action: Action, jobs: Sequence[str], by: str) -> Acted[Job]:
    """Asks something of jobs, or removes them; those that refuse leave the others alone."""
    acted: Acted[Job] = Acted([], {})
    for begin in range(0, len(jobs), _AT_ONCE):
        some = jobs[begin : begin + _AT_ONCE]
        if action == "remove" or action == "remove_checkpoints":
            part = "" if action == "remove" else _CHECKPOINTS
            with store.transaction():  # nothing may come to need a folder meanwhile
                taken = store.jobs.remove(some, needed=_needed(store), by=by, part=part)
            for job in taken.jobs:
                home.remove_job(job.id, part)
        else:
            taken = store.jobs.request_actions(some, action, by=by)
        acted.jobs.extend(taken.jobs)
        acted.refused.update(taken.refused)
    return acted


def _needed(store: Store) -> Mapping[str, str]:
    """Id of each job whose folder something unfinished may read -> what that is."""
    found = store.sessions.needed_jobs()
    for job, document in store.jobs.documents_with_folders().items():
        own = document.get("document", {})
        paths = [own[key] for key in ("init_from", "resume_from") if own.get(key)]
        text = json.dumps([document, *map(os.path.realpath, paths)])
        named = dict.fromkeys(_JOB_ID.findall(text), f"the unfinished job {job} names")
        found |= {name: why for name, why in named.items() if name != job}
    return found


def tidy(home: Home, store: Store, keep_s: float, now_s: float) -> None:
    """Removes what has ended `keep_s` ago, checkpoints before, and what kills have left of jobs.

    Logs of processes that have become long begin anew. Tokens of unfinished jobs count as used.
    """
    for log in filter(_is_long, _logs(home)):
        shutil.copyfile(log, log.with_name(f"{log.stem}.before"))
        os.truncate(log, 0)  # its writer appends, and goes on in the same file
    home.remove_remainders()
    for document in store.jobs.documents([job.id for job in store.load().jobs]).values():
        for key in document.get(ORDER, {}).get("tokens", {}).values():
            for entry in (home.tokens / key).glob("*"):
                os.utime(entry)
    for job_id in store.jobs.removed().intersection(os.listdir(home.jobs)):
        home.remove_job(job_id)
    old: dict[Action, list[str]] = {"remove_checkpoints": [], "remove": []}
    for job in store.jobs.each(OVER):
        age_s, days = now_s - (job.ended_at or now_s), job.schedule.get("keep_days")
        own_s = keep_s if days is None else min(keep_s, days * _DAY_S)
        if age_s >= own_s:
            old["remove"].append(job.id)
        elif age_s >= _SHARE * own_s and (home.job(job.id) / _CHECKPOINTS).exists():
            old["remove_checkpoints"].append(job.id)
    for action, jobs in old.items():
        act_on(home, store, action, jobs, "tlora serve")


def _logs(home: Home) -> list[Path]:
    """The logs of the service, of processes of gangs and samplers, and of those that wait."""
    patterns = ("*.log", "gangs/*/*.log", "standby/*.log", "sampler/*.log")
    return [log for pattern in patterns for log in home.root.glob(pattern)]


def _is_long(log: Path) -> bool:
    found = log.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_blocks * 512 > _LOG_BYTES
