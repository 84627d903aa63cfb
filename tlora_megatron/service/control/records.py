"""Jobs and gangs in a controller's memory: how rows become them, and what gangs are sent of them.

The store's rows are the truth. A job's document is the submission as its user sent it. Once it is
validated, it also holds the order: the document and the tokens' keys with which every gang prepares
the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.queue import Job, coarse_load
from tlora_megatron.service.control.actions import GangNow, Phase
from tlora_megatron.service.messages import GangSpec, JobOrder
from tlora_megatron.service.prepare.submission import ASKED, ORDER, Submission
from tlora_megatron.service.settings import Settings
from tlora_megatron.service.store import Job as JobRow
from tlora_megatron.service.store import JobState

ALONE = " // "
"""Between base and id in the name of the pool of a job that trains alone."""

_NEXT_S, _GATHER_S = 0.5, 3.0
"""A gang's first jobs join together if each is prepared so soon behind the last one, and all of
them within the time of a first round on a GPU (2.3 to 3.8 s on an H200)."""

Intent = Literal["move", "pause", "cancel"]
"""Why a job leaves its gang."""
_KEPT = {"gpus": "num_gpus"} | {
    name: name
    for name in (
        *("max_slowdown", "priority", "alone", "deaths", "trial_saves", "was_tried"),
        *("failed_saves", "saves_soon", "checkpoint_every_s", "keep_days", "sweep"),
        "pause",
    )
}
"""Key of a row's schedule -> field of `LiveJob`; what is not kept has the field's default."""
_LAYOUT = (
    *("tp_size", "pp_size", "sequence_parallel", "lora_sharding", "ep_size", "expert_tp_size"),
)
"""Fields of a plan in the section `parallel` of a gang."""


@dataclass(kw_only=True, slots=True)
class LiveJob:
    """A job that is not over."""

    id: str
    number: int
    """Grows with submission; the scheduler's index."""
    name: str
    tenant: str
    base: str
    """Jobs of equal bases may share a gang."""
    state: JobState
    requested: str | None = None
    """What its user asks for and is not done yet: cancel, pause or resume."""
    num_gpus: int = 1
    max_slowdown: float = 1.5
    priority: int = 0
    submitted_at: float = 0.0
    started_at: float | None = None
    load: JobLoad | None = None
    """None until it is validated."""
    tokens: float = 0.0
    """Rows of all its steps together; 0 of a job that a client drives."""
    trained_tokens: float = 0.0
    """Of the steps that it has made. Behind a step that is taken again they are estimated, up to
    the job's end."""
    step: int = 0
    num_steps: int = 0
    alone: bool = False
    """It trains in a gang of its own, after it made one fail."""
    deaths: int = 0
    """Gangs that died by themselves with it since its last step."""
    kills: int = 0
    """Gangs that were killed with it since its last step, as this controller has seen it."""
    trial_saves: int = 0
    """Checkpoints that it has to make alone before it may train in company again; 0 = no trial."""
    was_tried: bool = False
    """It has had its trial, but saved nothing in company since: set apart again, it stays so."""
    failed_saves: int = 0
    saves_soon: bool = False
    """Its last gang died with it: the next one saves it soon."""
    checkpoint_every_s: float | None = None
    """None: as the service's settings say."""
    keep_days: float | None = None
    """Days for which it is kept after its end; None: as the service's settings say."""
    sweep: str | None = None
    """Id of the sweep of which it is a trial."""
    pause: Mapping[str, Any] | None = None
    """Where and until when it comes back after a decision has paused it, as its row keeps it."""
    priced: Job | None = None
    """The job in the scheduler's own form."""

    @property
    def pool(self) -> str:
        """Name of the base model for the scheduler: a job that must be alone has one of its own."""
        return f"{self.base}{ALONE}{self.id}" if self.alone else self.base

    @property
    def is_open(self) -> bool:
        return self.load is not None and self.load.is_open

    @property
    def share_left(self) -> float:
        """Share of its work that is left."""
        return max(0.0, 1.0 - self.step / self.num_steps) if self.num_steps else 1.0

    @property
    def intent(self) -> Intent:
        """Why it leaves a gang, by what its user requests."""
        return cast(Intent, self.requested) if self.requested in ("cancel", "pause") else "move"


@dataclass(kw_only=True, slots=True)
class GangMember:
    """A job's place in a gang."""

    phase: Phase
    lease: int


@dataclass(kw_only=True, slots=True)
class LiveGang:
    """A gang of which some process may still live."""

    name: str
    epoch: int
    pool: str
    gpus: tuple[int, ...]
    """Cluster-wide numbers, ascending; none if a machine is gone on which it ran."""
    plan: Plan | None
    state: Literal["starting", "running", "stopping"]
    since_s: float
    """When it came into this state."""
    last_event_s: float
    idle_since_s: float
    last_event: int = 0
    """Number of its last event that was applied."""
    members: dict[str, GangMember] = field(default_factory=dict)
    in_first_round: set[str] = field(default_factory=set)
    changed: bool = True
    """Members came or went since the last report of its speed."""
    rounds: int = 0
    """Rounds since its start that it has reported."""
    speeds: list[float] = field(default_factory=list)
    """Its last tokens per second, since its members changed."""
    reported: dict[str, float] = field(default_factory=dict)
    """Tokens per second of each job in its last report."""
    reported_steady: bool = False
    """Its members were the same all the time of that report."""
    lease_until_s: float = 0.0
    commanded_s: float = 0.0
    """When it was last sent a command."""
    no_proof: str | None = None
    """Why it was killed, where the engine cannot prove that it is gone."""
    is_fresh: bool = False
    """No job has joined it since it started."""
    gathers_from_s: float = math.inf
    gathers_until_s: float = -math.inf

    def gather(self, now_s: float) -> None:
        """Lets a fresh gang's first jobs join together: its first round takes seconds."""
        if self.is_fresh:
            self.gathers_from_s = min(self.gathers_from_s, now_s)
            most_s = self.gathers_from_s + _GATHER_S
            self.gathers_until_s = min(now_s + _NEXT_S, most_s)

    def joined(self) -> None:
        self.is_fresh, self.gathers_until_s = False, -math.inf

    def now(self, now_s: float) -> GangNow:
        """The gang's present state, as `plan_actions` takes it."""
        return GangNow(
            gang=self.name,
            gpus=self.gpus,
            state=self.state,
            members={job: member.phase for job, member in self.members.items()},
            idle_s=0.0 if self.members else now_s - self.idle_since_s,
            in_first_round=frozenset(self.in_first_round),
            gathers=now_s < self.gathers_until_s,
        )


def live_job(row: JobRow) -> LiveJob:
    """The job of a row, as a controller keeps it."""
    asked = {field: row.schedule[key] for key, field in _KEPT.items() if key in row.schedule}
    live = LiveJob(
        id=row.id,
        number=row.number,
        name=row.name,
        tenant=row.tenant,
        base=row.base,
        state=row.state,
        requested=row.wish,
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        trained_tokens=float(row.tokens),
        step=row.step,
        num_steps=row.num_steps or 0,
        **asked,
    )
    if row.stats:
        take_stats(live, row.stats)
    return live


def schedule_of(live: LiveJob) -> dict[str, Any]:
    """Returns a job's scheduling settings as the store keeps them."""
    found = {key: getattr(live, field) for key, field in _KEPT.items()}
    return {key: value for key, value in found.items() if value}


def take_stats(live: LiveJob, stats: Mapping[str, Any]) -> None:
    """Takes up what validation found: lengths, steps and tokens."""
    lengths = LengthHistogram(tuple((int(rows), float(share)) for rows, share in stats["lengths"]))
    given = {**stats, "name": "job", "targets": tuple(stats["targets"]), "lengths": lengths}
    load = JobLoad(**{f.name: given[f.name] for f in fields(JobLoad) if f.name in given})
    live.load = coarse_load(load)
    live.tokens, live.num_steps = float(stats["tokens"]), int(stats["num_steps"])


def stats_of(load: JobLoad, *, tokens: float, num_steps: int) -> dict[str, Any]:
    """Returns a validated job's figures as its row keeps them, for `take_stats`."""
    kept = asdict(load) | {"lengths": load.lengths.pairs, "tokens": tokens, "num_steps": num_steps}
    del kept["name"]
    return kept


def submission_of(document: Mapping[str, Any]) -> Submission:
    """The submission that a row's document holds, or a `ValueError`."""
    beside = (ASKED, ORDER)
    fields = {name: value for name, value in document.items() if name not in beside}
    try:
        return Submission(**fields)
    except TypeError as error:
        raise ValueError(f"a submission must have its fields: {error}") from error


def job_order(
    live: LiveJob,
    document: Mapping[str, Any],
    lease: int,
    settings: Settings,
    hold_at: tuple[int, ...] = (),
) -> dict[str, Any]:
    """The body of `prepare`."""
    own = document.get(ORDER) or {"document": document.get("document", {})}
    order = JobOrder(
        job=live.id,
        name=live.name,
        lease=lease,
        checkpoint_every_s=live.checkpoint_every_s or settings.checkpoint_every_s,
        saves_soon=live.saves_soon,
        hold_at=hold_at,
        **own,
    )
    found = asdict(order)
    if not hold_at:  # gangs of an earlier version do not know the word
        del found["hold_at"]
    return found


def gang_spec(
    *,
    name: str,
    epoch: int,
    base_model: Mapping[str, Any],
    plan: Plan | None,
    gpus: Sequence[tuple[int, int]],
    root: Path,
    settings: Settings,
) -> GangSpec:
    """Makes an engine's order to start a gang; without a plan all processes are data-parallel."""
    parallel: dict[str, Any] = {}
    run: dict[str, Any] = {"micro_batch_tokens": settings.micro_batch_tokens}
    if plan is not None:
        parallel = {name: getattr(plan, name) for name in _LAYOUT}
        tokens = max(plan.micro_batch_tokens, settings.micro_batch_tokens)
        run = {"micro_batch_tokens": tokens, "recompute": plan.recompute}
    return GangSpec(
        gang=name,
        epoch=epoch,
        base_model=dict(base_model),
        parallel=parallel,
        run=run,
        gpus=tuple(gpus),
        root=str(root),
        lease_s=settings.lease_s,
    )


def plan_of(spec: GangSpec) -> Plan:
    """The plan under which a gang runs, as far as its spec says it."""
    asked = {**spec.parallel, **spec.run}
    names = (*_LAYOUT, "micro_batch_tokens", "recompute")
    plan = Plan(**{name: asked[name] for name in names if name in asked})
    return replace(plan, dp_size=max(1, spec.world_size // (plan.tp_size * plan.pp_size)))
