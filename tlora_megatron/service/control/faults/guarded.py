"""An engine whose troubles are told from all other errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from tlora_megatron.service.engines.protocol import Cursor, GangEngine, GangInfo, NodeInfo
from tlora_megatron.service.messages import Command, GangEvent, GangSpec

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class EngineLost(RuntimeError):
    """The engine does not answer."""


class GuardedEngine:
    """Passes the six calls on, and says `EngineLost` where the engine cannot be reached."""

    def __init__(self, engine: GangEngine) -> None:
        self._engine = engine

    @property
    def shares_gpus(self) -> bool:
        """True if a gang may start on GPUs that another one still has."""
        return self._engine.shares_gpus

    def start(self, spec: GangSpec) -> None:
        """Begins to start a gang."""
        _ask(self._engine.start, spec)

    def post(self, command: Command) -> None:
        """Hands a command over."""
        _ask(self._engine.post, command)

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor."""
        return _ask(self._engine.poll, since)

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes of a gang."""
        return _ask(self._engine.kill, gang, epoch)

    def gangs(self) -> Sequence[GangInfo]:
        """The gangs that run now."""
        return _ask(self._engine.gangs)

    def nodes(self) -> Sequence[NodeInfo]:
        """The machines; an engine that has lost all of them does not answer either."""
        found = _ask(self._engine.nodes)
        if not any(node.gpus for node in found):
            raise EngineLost("it has no machine with a GPU or seat")
        return found


def _ask(call: Callable[_Given, _Answer], *args: _Given.args, **fields: _Given.kwargs) -> _Answer:
    try:
        return call(*args, **fields)
    except (RuntimeError, OSError) as error:
        raise EngineLost(str(error)) from error
