"""What a service knows: jobs, gangs, commands, leases and events in SQLite or PostgreSQL."""

try:
    import sqlalchemy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "a service's store needs SQLAlchemy: pip install 'tlora-megatron[serve]'"
    ) from error

from tlora_megatron.service.store.errors import (
    EventGap,
    IllegalChange,
    KeyReused,
    LeaseHeld,
    LockHeld,
    LockLost,
    NameTaken,
    NotFound,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from tlora_megatron.service.store.states import (
    GANG_CHANGES,
    JOB_CHANGES,
    LIVE,
    OVER,
    GangState,
    JobState,
    Wish,
)
from tlora_megatron.service.store.store import Store, open_store
from tlora_megatron.service.store.values import (
    Decision,
    Event,
    Gang,
    Job,
    Lease,
    Lock,
    NewJob,
    Progress,
    Snapshot,
)

__all__ = [
    "GANG_CHANGES",
    "JOB_CHANGES",
    "LIVE",
    "OVER",
    "Decision",
    "Event",
    "EventGap",
    "Gang",
    "GangState",
    "IllegalChange",
    "Job",
    "JobState",
    "KeyReused",
    "Lease",
    "LeaseHeld",
    "Lock",
    "LockHeld",
    "LockLost",
    "NameTaken",
    "NewJob",
    "NotFound",
    "Progress",
    "Snapshot",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "StoreUnreachable",
    "Wish",
    "open_store",
]
