"""Engines start and watch gangs: six calls that each of them answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tlora_megatron.service.messages import Command, GangEvent, GangSpec

Cursor = Mapping[tuple[str, int], int]
"""Number of the last event that was read, by gang and epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangInfo:
    """A gang that an engine knows."""

    gang: str
    epoch: int
    alive: bool
    """True while all its processes are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A machine that can hold gangs."""

    node: int
    address: str
    gpus: int
    """GPUs, or worker slots on a machine without any."""
    healthy: bool = True


class GangEngine(Protocol):
    """Starts, addresses, watches and ends gangs. No call waits for a gang to do something."""

    @property
    def shares_gpus(self) -> bool:
        """True if a gang may start on GPUs that another one still has."""

    def start(self, spec: GangSpec) -> None:
        """Begins to start a gang and returns; `started` or `died` follows as an event.

        Raises:
            RuntimeError: if the engine itself cannot be reached.
        """

    def post(self, command: Command) -> None:
        """Hands a command over; the same one twice has the effect of one."""

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor, in order within each gang; `died` is one of them.

        An ended gang's events are returned once, later only if the cursor names it.
        """

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes by SIGKILL; returns True with proof that they are gone."""

    def gangs(self) -> Sequence[GangInfo]:
        """The gangs that run now, whoever started them: a new controller takes them up again."""

    def nodes(self) -> Sequence[NodeInfo]:
        """The machines, in the order of their numbers."""
