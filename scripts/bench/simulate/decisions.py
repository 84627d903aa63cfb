"""CPU time of decisions while 1,000 jobs wait whose mixes nobody has asked the model about."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from scripts.bench.control_tower import NOW_S, RUNNING, WAITING, crowd, make_study
from tlora_megatron.scheduler.policy import Changes, ClusterState, Rules
from tlora_megatron.scheduler.queue import WaitingQueue
from tlora_megatron.scheduler.registry import make_policy
from tlora_megatron.sim.study import Study

MIXES = ("paper", "measured")


class Timed(NamedTuple):
    """One decision."""

    took_ms: float
    formed: int
    """Groups that it forms."""
    asked: int
    """Mixes that it asked the model about."""


def first_decision(
    policy: str, study: Study, rules: Rules, queue: WaitingQueue, state: ClusterState
) -> Timed:
    """A decision by a model that knows jobs alone, as a service does after they are submitted."""
    made = make_policy(policy, study.speeds, rules)
    changes = Changes(
        arrived=frozenset(range(RUNNING, RUNNING + WAITING)),
        regrouped=frozenset(range(RUNNING)),
        freed=True,
    )
    known, begin = study.speeds.num_estimates, time.process_time()
    found = made.decide(NOW_S, queue, state, changes)
    took_ms = (time.process_time() - begin) * 1e3
    return Timed(took_ms, len(found), study.speeds.num_estimates - known)


def in_a_fork(run: Callable[[], Timed]) -> Timed:
    """Runs it in a copy of this process, so that what the model learns there is forgotten."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(run()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = Timed(*json.load(answer))
    os.waitpid(child, 0)
    return found


def decision_rows(
    policies: Sequence[str], seeds: Sequence[int], commit: str
) -> Iterator[dict[str, Any]]:
    """A row for each mix of attributes and policy: the longest decision of all seeds."""
    for mix in MIXES:
        took: dict[str, list[Timed]] = {policy: [] for policy in policies}
        for seed in seeds:
            study, rules = make_study(mix, seed), Rules()
            queue, state = crowd(study, rules)
            for policy, times in took.items():
                decide = partial(first_decision, policy, study, rules, queue, state)
                times.append(in_a_fork(decide))
        for policy, times in took.items():
            longest = max(times)
            print(f"{mix:9} {policy:14} {longest.took_ms:7.1f} ms, {longest.asked} new mixes")
            yield {
                "commit": commit,
                "mix": mix,
                "policy": policy,
                "waiting": WAITING,
                "running": RUNNING,
                "seeds": len(seeds),
                "longest_ms": round(longest.took_ms, 1),
                "groups_formed": longest.formed,
                "new_mixes": longest.asked,
            }
