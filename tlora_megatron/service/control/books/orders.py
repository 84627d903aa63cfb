"""Reads jobs from the store's rows, and writes what gangs need of them.

A row's document is the submission as its user sent it. Once it is validated, it also holds the
order: the document and the tokens' keys with which every gang prepares the job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.coarse_loads import coarse_load
from tlora_megatron.service.control.books.live import LiveJob
from tlora_megatron.service.control.settings import Settings
from tlora_megatron.service.messages import GangSpec, JobOrder
from tlora_megatron.service.prepare.submission import ASKED, Submission
from tlora_megatron.service.store import Job

ORDER = "order"
"""Key of a row's document that holds what validation made of it."""


def live_job(row: Job) -> LiveJob:
    """The job of a row, as a controller keeps it."""
    asked = dict(row.schedule)
    live = LiveJob(
        id=row.id,
        number=row.number,
        name=row.name,
        tenant=row.tenant,
        base=row.base,
        state=row.state,
        wish=row.wish,
        num_gpus=int(asked.get("gpus", 1)),
        max_slowdown=float(asked.get("max_slowdown", 1.5)),
        priority=int(asked.get("priority", 0)),
        submitted_at=row.submitted_at,
        started_at=row.started_at,
        step=row.step,
        num_steps=row.num_steps or 0,
        alone=bool(asked.get("alone", False)),
        deaths=int(asked.get("deaths", 0)),
        failed_saves=int(asked.get("failed_saves", 0)),
        pause=asked.get("pause"),
    )
    if row.stats:
        take_stats(live, row.stats)
        if live.is_open:
            live.tokens = float(row.tokens)
    return live


def schedule_of(live: LiveJob) -> dict[str, Any]:
    """Returns a job's scheduling wishes as the store keeps them."""
    asked: dict[str, Any] = {
        "gpus": live.num_gpus,
        "max_slowdown": live.max_slowdown,
        "priority": live.priority,
    }
    found = {
        "alone": live.alone,
        "deaths": live.deaths,
        "failed_saves": live.failed_saves,
        "pause": live.pause,
    }
    return asked | {name: value for name, value in found.items() if value}


def take_stats(live: LiveJob, stats: Mapping[str, Any]) -> None:
    """Takes up what validation found: lengths, steps and tokens."""
    pairs = tuple((int(rows), float(share)) for rows, share in stats["lengths"])
    load = JobLoad(
        name="job",
        rank=int(stats["rank"]),
        targets=tuple(stats["targets"]),
        batch_size=int(stats["batch_size"]),
        lengths=LengthHistogram(pairs),
        dropout=float(stats.get("dropout", 0.0)),
        target_share=float(stats.get("target_share", 1.0)),
        longest_eval=int(stats.get("longest_eval", 0)),
        num_blocks=int(stats.get("num_blocks", 1)),
        expert_rank=stats.get("expert_rank"),
        shares_outer=bool(stats.get("shares_outer", False)),
        is_open=bool(stats.get("is_open", False)),
    )
    live.load = coarse_load(load)
    live.tokens = float(stats["tokens"])
    live.num_steps = int(stats["num_steps"])


def stats_of(load: JobLoad, *, tokens: float, num_steps: int) -> dict[str, Any]:
    """Returns a validated job's figures as its row keeps them, for `take_stats`."""
    return {
        "lengths": [list(pair) for pair in load.lengths.pairs],
        "rank": load.rank,
        "targets": list(load.targets),
        "batch_size": load.batch_size,
        "dropout": load.dropout,
        "target_share": load.target_share,
        "longest_eval": load.longest_eval,
        "num_blocks": load.num_blocks,
        "expert_rank": load.expert_rank,
        "shares_outer": load.shares_outer,
        "is_open": load.is_open,
        "tokens": tokens,
        "num_steps": num_steps,
    }


def submission_of(document: Mapping[str, Any]) -> Submission:
    """The submission that a row's document holds.

    Raises:
        ValueError: if it holds something else.
    """
    beside = (ASKED, ORDER)
    fields = {name: value for name, value in document.items() if name not in beside}
    return Submission.from_json(json.dumps(fields))


def job_order(
    live: LiveJob, document: Mapping[str, Any], lease: int, settings: Settings
) -> dict[str, Any]:
    """The body of `prepare`."""
    own = document.get(ORDER) or {"document": document.get("document", {})}
    order = JobOrder(
        job=live.id,
        name=live.name,
        document=own["document"],
        tokens=own.get("tokens", {}),
        lease=lease,
        checkpoint_every_s=settings.checkpoint_every_s,
    )
    return asdict(order)


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
        parallel = {
            "tp_size": plan.tp_size,
            "pp_size": plan.pp_size,
            "sequence_parallel": plan.sequence_parallel,
            "lora_sharding": plan.lora_sharding,
            "ep_size": plan.ep_size,
            "expert_tp_size": plan.expert_tp_size,
        }
        run = {
            "micro_batch_tokens": max(plan.micro_batch_tokens, settings.micro_batch_tokens),
            "recompute": plan.recompute,
        }
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
    parallel, run = spec.parallel, spec.run
    tp_size, pp_size = parallel.get("tp_size", 1), parallel.get("pp_size", 1)
    return Plan(
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=max(1, spec.world_size // (tp_size * pp_size)),
        ep_size=parallel.get("ep_size", 1),
        expert_tp_size=parallel.get("expert_tp_size"),
        sequence_parallel=parallel.get("sequence_parallel", False),
        lora_sharding=parallel.get("lora_sharding", "fold"),
        micro_batch_tokens=run.get("micro_batch_tokens", 8192),
        recompute=run.get("recompute", "none"),
    )
