"""Gangs that an engine has in its hands: which it tells of, and where one may be started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tlora_megatron.service.engines.protocol import GangInfo
from tlora_megatron.service.messages import GangSpec


class PresentGang(Protocol):
    """A gang in an engine's hands."""

    @property
    def is_ending(self) -> bool:
        """True once one of its processes was missed, or all are to end."""

    @property
    def is_over(self) -> bool:
        """True once nothing is left of it."""


def infos(gangs: Mapping[tuple[str, int], PresentGang]) -> tuple[GangInfo, ...]:
    """The gangs with processes, by name and epoch."""
    return tuple(
        GangInfo(gang=name, epoch=epoch, alive=not gang.is_ending)
        for (name, epoch), gang in gangs.items()
        if not gang.is_over
    )


def check_places(spec: GangSpec, counts: Sequence[int]) -> None:
    """Refuses a gang whose places are not there.

    Args:
        counts: places of each node.

    Raises:
        ValueError: naming the gang.
    """
    are_there = all(
        0 <= node < len(counts) and 0 <= place < counts[node] for node, place in spec.gpus
    )
    if not are_there or len(set(spec.gpus)) < len(spec.gpus):
        raise ValueError(
            f"the places of gang {spec.gang} must be different ones on nodes with "
            f"{list(counts)} places, got {spec.gpus}"
        )
