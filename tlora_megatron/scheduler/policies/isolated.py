"""`isolated` and `isolated_sjf`: every job trains alone on the GPUs it asks for (no fusing)."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.admission import start_alone
from tlora_megatron.scheduler.policies.tentative_groups import TentativeGroups
from tlora_megatron.scheduler.policy import Changes, Decision, Rules
from tlora_megatron.scheduler.queue import WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolated:
    """Starts jobs alone, in order; a job that does not fit lets others pass until it is overdue."""

    speeds: Speeds
    rules: Rules
    shortest_first: bool = False
    """Order jobs by the time they take alone; False: by submission."""
    keeps_bounds: bool = True

    def decide(
        self, now_s: float, jobs: WaitingQueue, cluster: ClusterState, changes: Changes
    ) -> list[Decision]:
        """Starts waiting jobs on free GPUs; implements `Policy.decide`."""
        if not len(jobs) or not cluster.free.num:
            return []
        ordered = jobs.by_size if self.shortest_first else jobs.by_arrival
        others = ordered(self.rules.lookahead, cluster.may_run)
        tentative = TentativeGroups(now_s, cluster, self.speeds, self.rules)
        start_alone(tentative, jobs, cluster, changes, others)
        return tentative.decisions()
