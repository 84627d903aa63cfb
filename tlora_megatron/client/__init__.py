"""A client of a service over HTTP, with plain calls or an event loop; needs httpx alone."""

try:
    import httpx  # noqa: F401
except ImportError as error:
    raise ImportError("the client needs httpx: pip install 'tlora-megatron[serve]'") from error

from tlora_megatron.client.asynchronous import AsyncClient
from tlora_megatron.client.synchronous import Client
from tlora_megatron.client.values import (
    Event,
    Job,
    JobState,
    Page,
    ServiceError,
    Submitted,
    Unreachable,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "Job",
    "JobState",
    "Page",
    "ServiceError",
    "Submitted",
    "Unreachable",
]
