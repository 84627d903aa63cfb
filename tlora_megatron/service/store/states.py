"""States of gangs, which states may follow which, and the errors of a store that refuses."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from tlora_megatron.config.job_rows import LIVE as LIVE
from tlora_megatron.config.job_rows import OVER as OVER
from tlora_megatron.config.job_rows import JobState as JobState
from tlora_megatron.config.job_rows import RequestedAction as RequestedAction


class GangState(StrEnum):
    """Where a gang stands."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    """There is proof that none of its processes is left."""


def _job_changes() -> dict[JobState, frozenset[JobState]]:
    state = JobState
    follow: dict[JobState, set[JobState]] = {
        state.VALIDATING: {state.QUEUED},
        state.QUEUED: {state.STARTING, state.PAUSED},
        state.STARTING: {state.RUNNING, state.SAVING, state.QUEUED, state.PAUSED},
        # Back to the queue: its gang died. Finished without saving first: its last step came.
        state.RUNNING: {state.SAVING, state.MOVING, state.QUEUED, state.PAUSED},
        # Running again: the gang could not save, and the job stays where it is.
        state.SAVING: {state.RUNNING, state.QUEUED, state.PAUSED},
        state.MOVING: {state.STARTING, state.RUNNING, state.QUEUED, state.PAUSED},
        state.PAUSED: {state.QUEUED},
    }
    for job_state in (state.RUNNING, state.SAVING, state.MOVING):
        follow[job_state].add(state.FINISHED)
    # A job whose last step was saved before its gang died finishes when a gang takes it up again.
    follow[state.STARTING].add(state.FINISHED)
    for targets in follow.values():
        targets |= {state.FAILED, state.CANCELLED}
    return {job_state: frozenset(follow.get(job_state, ())) for job_state in state}


JOB_CHANGES: Mapping[JobState, frozenset[JobState]] = _job_changes()
"""State -> the states that may follow it; nothing follows those in `OVER`."""

GANG_CHANGES: Mapping[GangState, frozenset[GangState]] = {
    GangState.STARTING: frozenset({GangState.RUNNING, GangState.STOPPING, GangState.ENDED}),
    GangState.RUNNING: frozenset({GangState.STOPPING, GangState.ENDED}),
    GangState.STOPPING: frozenset({GangState.ENDED}),
    GangState.ENDED: frozenset(),
}


class StoreError(RuntimeError):
    """The store cannot do what was asked; nothing of it was kept."""


class StoreFull(StoreError):
    """The disk below the store has no room."""


class StoreBusy(StoreError):
    """Other writers held the store for longer than this one waits."""


class StoreUnreachable(StoreError):
    """The store's file or server cannot be opened or does not answer."""


class Refusal(StoreError):
    """The request cannot be granted: asking again for the same is refused again."""


class NotFound(Refusal):
    """There is no such job, gang, command, token or file."""


class KeyReused(Refusal):
    """An idempotency key came again with another job."""


class NameTaken(Refusal):
    """An unfinished job of the tenant has the name already."""


class OverLimit(Refusal):
    """A tenant has as much as it may have."""


class IllegalChange(Refusal):
    """A job or gang must not change so from the state it is in."""


class LeaseHeld(StoreError):
    """Another gang may still write the job's folder."""


class LockHeld(StoreError):
    """Another controller runs on this store."""


class LockLost(StoreError):
    """Another controller has taken over; this one must not write any more."""
