"""What all engines do alike: gangs are started, told things, heard and ended through their folders.

An engine of its own kind adds how ranks are started (`launch`), which of those that are there are
taken up (`adopt`), its machines (`nodes`), and how one of its gangs is watched and ended
(`GangHandle`).
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tlora_megatron.append_log import AppendLog
from tlora_megatron.files import modified_s
from tlora_megatron.service.engines.protocol import Cursor, GangInfo, NodeInfo
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import Command, GangEvent, GangFolder, GangSpec

_ASKED = "the service has ended it"
_LOOK_S = 0.005
"""Between two looks whether a gang that was killed is gone."""
_KEEP_S, _KEEP = 7 * 86400.0, 1000
"""Logs and events of a gang that is over are kept so long, and of so many gangs."""
_SWEEP_S = 3600.0
Key = tuple[str, int]


class GangHandle(ABC):
    """One start of a gang in an engine's hands: its folder, and how far its end is."""

    def __init__(self, folder: GangFolder, spec: GangSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.log = folder.events()
        """Its events as its rank 0 writes them."""
        self._commands = folder.commands()
        self.died: Mapping[str, Any] | None = None
        """Body of its last event, once one of its processes was missed or all are to end."""
        self.has_spoken = False
        """True once an event of it was read: it has started, or failed to."""
        self.is_over = False
        """True once all is done that can be done to end it, and its last event is written."""
        self.is_proved = True
        """False while it is over and nobody could prove that none of its processes is left."""

    @property
    def has_stopped(self) -> bool:
        """True once it has said that it ends as asked; its processes may still be there."""
        last = self.log.last()
        return last is not None and last.kind == "stopped"

    @property
    def is_ending(self) -> bool:
        """True once one of its processes was missed, or all are to end."""
        return self.died is not None

    @abstractmethod
    def look(self) -> None:
        """Ends the gang if one of its processes has ended; waits for none of them."""

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Begins to end all processes by SIGKILL; `look` carries it on."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of the processes, which go on."""

    def post(self, command: Command) -> None:
        """Leaves a command in the gang's folder; one for a gang that is over is dropped."""
        if not self.is_over:
            self._commands.append(command, durable=True)

    def events(self, number: int) -> list[GangEvent]:
        """Events behind a number, in order; `stopped` only when the processes have followed it."""
        events = self.log.after(number)
        self.has_spoken = self.has_spoken or bool(events)
        is_early = bool(events) and events[-1].kind == "stopped" and not self.is_over
        return events[:-1] if is_early else events


Handle = TypeVar("Handle", bound=GangHandle)


class GangEngine(ABC, Generic[Handle]):
    """Starts, addresses, watches and ends gangs. No call but `kill` waits for a gang.

    It works by the gangs' folders, which outlive whoever writes and reads them. `adopt_all` takes
    up gangs of an earlier engine, and ends those that are not whole.
    """

    shares_gpus = False
    """True if a gang may start on GPUs that another one still has."""
    kill_s = 2.0
    """For which `kill` waits: a process within a driver's call is not gone at once."""

    def __init__(self, root: Path | str, rank_command: Sequence[str]) -> None:
        self.home = Home.open(root)
        self.rank_command = tuple(rank_command)
        self._gangs: dict[Key, Handle] = {}
        """Those that are not over, and those that are and were not told of since."""
        self._past = PastGangs(self.home)

    @abstractmethod
    def launch(self, folder: GangFolder, spec: GangSpec) -> Handle:
        """Starts the ranks of a gang whose folder has its spec."""

    @abstractmethod
    def adopt(self, folder: GangFolder, *, has_stopped: bool) -> Handle | None:
        """Takes up a gang that has not died; None if nothing of it is left. It may have stopped."""

    @abstractmethod
    def nodes(self) -> Sequence[NodeInfo]:
        """The machines, in the order of their numbers."""

    def check_reachable(self, spec: GangSpec) -> None:
        """Raises RuntimeError while no gang can be started."""

    def look(self) -> None:
        for gang in self._gangs.values():
            gang.look()

    def start(self, spec: GangSpec) -> None:
        """Begins to start a gang; `started` or `died` follows as an event.

        A second call with the same epoch does nothing.

        Raises:
            ValueError: if its places are not there.
            RuntimeError: if what starts ranks cannot be reached.
        """
        key = (spec.gang, spec.epoch)
        folder = GangFolder(self.home.root, spec.gang, spec.epoch)
        if key in self._gangs or folder.has_spec:
            return
        counts = [node.gpus for node in self.nodes()]
        are_there = all(
            0 <= node < len(counts) and 0 <= place < counts[node] for node, place in spec.gpus
        )
        if not are_there or len(set(spec.gpus)) < len(spec.gpus):
            raise ValueError(
                f"the places of gang {spec.gang} must be different ones on nodes with {counts} "
                f"places, got {spec.gpus}"
            )
        self.check_reachable(spec)
        folder.create(spec)
        self._gangs[key] = self.launch(folder, spec)

    def post(self, command: Command) -> None:
        """Leaves a command in a gang's folder; one for a gang that is over is dropped."""
        gang = self._gangs.get((command.gang, command.epoch))
        if gang is not None:
            gang.post(command)

    def poll(self, since: Cursor) -> Sequence[GangEvent]:
        """Events after the cursor, in order within each gang; `died` is one of them.

        Deaths are seen and acted on here, so call it often. An ended gang's events are returned
        once, later only if the cursor names it.
        """
        self.look()
        events = self._past.events(since, self._gangs)
        for key, gang in list(self._gangs.items()):
            if gang.is_over and gang.is_proved:
                del self._gangs[key]
            elif gang.is_over and key not in since:
                continue
            events += gang.events(since.get(key, 0))
        self._past.sweep(self._gangs)
        return events

    def kill(self, gang: str, epoch: int) -> bool:
        """Ends all processes of a gang by SIGKILL; True with proof that they are gone."""
        known = self._gangs.get((gang, epoch))
        if known is None:
            return True
        known.kill(_ASKED)
        end_s = time.monotonic() + self.kill_s
        self.look()
        while not known.is_over and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
            self.look()
        return known.is_over and known.is_proved

    def gangs(self) -> Sequence[GangInfo]:
        """Gangs with processes, whoever started them: a new controller takes them up again."""
        self.look()
        return tuple(
            GangInfo(gang=name, epoch=epoch, alive=not gang.is_ending)
            for (name, epoch), gang in self._gangs.items()
            if not gang.is_over
        )

    def close(self) -> None:
        """Lets go of the gangs, which go on."""
        for gang in self._gangs.values():
            gang.release()
        self._gangs.clear()

    def adopt_all(self) -> None:
        """Takes up the gangs of the service's folder, and removes folders of old ones."""
        for folder in GangFolder.all_of(self.home):
            last = folder.events().last()
            kind = None if last is None else last.kind
            if folder.has_spec and kind != "died":
                gang = self.adopt(folder, has_stopped=kind == "stopped")
                if gang is not None:
                    self._gangs[folder.gang, folder.epoch] = gang
        self._past.remove_old(self._gangs)


class PastGangs:
    """Gangs that no engine has in its hands: what they told, and when their folders go."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._logs: dict[Key, AppendLog[GangEvent]] = {}
        self._swept_s = time.monotonic()

    def events(self, since: Cursor, present: Collection[Key]) -> list[GangEvent]:
        """Events of past gangs behind a cursor that names them, but of `present` ones."""
        asked = {key: number for key, number in since.items() if key not in present}
        self._logs = {
            key: self._logs.get(key) or GangFolder(self._home.root, *key).events() for key in asked
        }
        return [event for key in asked for event in self._logs[key].after(asked[key])]

    def sweep(self, present: Collection[Key]) -> None:
        """Removes old folders, from time to time."""
        if time.monotonic() >= self._swept_s + _SWEEP_S:
            self._swept_s = time.monotonic()
            self.remove_old(present)

    def remove_old(self, present: Collection[Key]) -> None:
        """Removes the folders of gangs that were over for a week, or of the oldest of very many."""
        folders = [f for f in GangFolder.all_of(self._home) if (f.gang, f.epoch) not in present]
        changed = sorted(((modified_s(f.path), f.path) for f in folders), reverse=True)
        for place, (changed_s, path) in enumerate(changed):
            if place >= _KEEP or time.time() - changed_s > _KEEP_S:
                shutil.rmtree(path, ignore_errors=True)
