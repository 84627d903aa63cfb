"""The number of nano-batches of an engine, as training sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tlora_megatron.parallel.nano.overlap import LaneRoom
from tlora_megatron.parallel.transport.tensor_collectives import DEFAULT_MAX_BYTES, Kind


@dataclass(frozen=True, kw_only=True, slots=True)
class NanoSettings:
    """Mechanism and size of the collectives of nano-batches."""

    transport: Kind = "auto"
    """Mechanism of the tensor-parallel collectives; see `RunSpec.tensor_collectives`."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Bytes of the largest collective of a nano-batch; larger ones are sent in pieces."""


class NanoSwitch(Protocol):
    """Sets into how many nano-batches an engine cuts its micro-batches."""

    @property
    def count(self) -> int:
        """Most nano-batches of a micro-batch; stays 1 where the model cannot be cut."""

    def set_count(self, count: int) -> None:
        """Sets the count for the rounds to come; collective over the world."""

    def room(self) -> LaneRoom:
        """Returns the number of nano-batches that this process's device has memory for."""

    def close(self) -> None:
        """Releases what the collectives hold; collective over the world."""
