"""Settings of a controller."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.scheduler.registry import DEFAULT_POLICY


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a controller schedules, and how long it waits."""

    policy: str = DEFAULT_POLICY
    """Name in `scheduler.registry.POLICIES`."""
    hardware: str | None = None
    """Hardware profile, a name or a path; None: that of the GPU, else the rough one of CPUs."""
    database: str | None = None
    """Address of the store; None: `store.sqlite` in the service's folder."""
    max_group_size: int = 16
    lookahead: int = 128
    """Waiting jobs that a decision looks at."""
    data_root: str | None = None
    """Jobs may name files below this folder only, and through no link; None: any that can be read.
    """
    micro_batch_tokens: int = 4096
    """Tokens by which portions of jobs are chosen: no gang's micro-batch is smaller."""

    tick_s: float = 10.0
    """A decision is made at least so often."""
    coalesce_s: float = 0.1
    """Time after a change in which further ones are decided about together with it."""
    poll_s: float = 0.04
    """Time between two looks at engine and store."""
    look_s: float = 10.0
    """Time between two looks at machines, unknown gangs, and gangs that are silent."""

    idle_keep_s: float = 600.0
    """How long a gang without jobs keeps its GPUs while no group wants them."""
    lease_s: float = 600.0
    """A gang stops writing when no controller has sent it anything for so long."""
    checkpoint_every_s: float = 60.0
    hang_s: float = 600.0
    """A gang with jobs that sends no event for so long is killed and started again."""
    stop_s: float = 300.0
    """A gang that was asked to stop and has not ended after so long is killed."""

    dwell_s: float = 60.0
    """A group that was moved or resized stays so at least so long."""
    regroups_per_min: int = 4
    """Most moves and resizes in the cluster in a minute; jobs that join or start do not count."""
    gain_over_cost: float = 3.0
    """A regrouping must bring so many times the tokens that its pause costs."""

    max_deaths: int = 3
    """Deaths of its gangs, without a step between them, after which a job trains alone or fails."""
    max_failed_saves: int = 2
    """Failed saves in a row after which a job is paused."""
    end_gangs: bool = False
    """Save and stop all gangs when the controller is to stop; else they train on."""
    end_gangs_s: float = 30.0
    decide_in_thread: bool = True
