"""The memory of a service: jobs, gangs, commands, leases and events in SQLite or PostgreSQL."""

try:
    import sqlalchemy  # noqa: F401
except ImportError as error:
    raise ImportError(
        "a service's store needs SQLAlchemy: pip install 'tlora-megatron[serve]'"
    ) from error

from tlora_megatron.service.store.errors import (
    IllegalChange,
    KeyReused,
    LeaseHeld,
    LockHeld,
    LockLost,
    NameTaken,
    NotFound,
    OverLimit,
    Refusal,
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
from tlora_megatron.service.store.tenancy.values import (
    LOCAL,
    SCOPES,
    NewUpload,
    TenantLimits,
    Token,
    Upload,
)
from tlora_megatron.service.store.values import (
    Board,
    Decision,
    Event,
    Gang,
    Job,
    Lease,
    Lock,
    NewJob,
    Progress,
    Snapshot,
    Stay,
)

__all__ = [
    "GANG_CHANGES",
    "JOB_CHANGES",
    "LIVE",
    "LOCAL",
    "OVER",
    "SCOPES",
    "Board",
    "Decision",
    "Event",
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
    "NewUpload",
    "NotFound",
    "OverLimit",
    "Progress",
    "Refusal",
    "Snapshot",
    "Stay",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "StoreUnreachable",
    "TenantLimits",
    "Token",
    "Upload",
    "Wish",
    "open_store",
]
