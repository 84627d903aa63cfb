"""`isolated` and `isolated_sjf`: each job alone on the GPUs it asks for, as without fusing."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.cluster import ClusterState
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.policies.admission import start_alone
from tlora_megatron.scheduler.policies.tentative_groups import Draft
from tlora_megatron.scheduler.policy import Decision, Rules
from tlora_megatron.scheduler.queue import WaitingQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolated:
    """A job that does not fit is passed over until it is overdue."""

    speeds: Speeds
    rules: Rules
    shortest_first: bool = False
    """Order: time that the job takes alone; otherwise submission."""
    keeps_bounds: bool = True

    def decide(self, now_s: float, jobs: WaitingQueue, cluster: ClusterState) -> list[Decision]:
        """See `Policy.decide`."""
        if not len(jobs) or not cluster.free.num:
            return []
        ordered = jobs.by_size if self.shortest_first else jobs.by_arrival
        others = ordered(self.rules.lookahead, cluster.may_run)
        draft = Draft(now_s, cluster, self.speeds, self.rules)
        start_alone(draft, jobs, cluster, others)
        return draft.decisions()
