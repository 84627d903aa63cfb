"""Gangs that are over: what they told, for who asks again, and when their folders go."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from tlora_megatron.service.engines.protocol import Cursor
from tlora_megatron.service.home import Home
from tlora_megatron.service.mail.folder import EventReader, GangFolder
from tlora_megatron.service.messages import GangEvent

logger = logging.getLogger(__name__)

_KEEP_S, _KEEP = 7 * 86400.0, 1000
"""Logs and events of a gang that is over are kept so long, and of so many gangs."""
_SWEEP_S = 3600.0
_Key = tuple[str, int]


def gang_folders(home: Home) -> list[GangFolder]:
    """The folders of all gangs, in the order of their names; what is none of them is left alone."""
    found = []
    for path in sorted(home.gangs.iterdir()):
        try:
            found.append(GangFolder.at(path))
        except ValueError:
            logger.warning("%s is no gang's folder: it is left alone", path)
    return found


class PastGangs:
    """The gangs of a service's folder that no engine has in its hands any more."""

    def __init__(self, root: Path) -> None:
        self._home = Home(root)
        self._readers: dict[_Key, EventReader] = {}
        self._swept_s = time.monotonic()

    def events(self, since: Cursor, present: Collection[_Key]) -> list[GangEvent]:
        """Returns the events of past gangs behind a cursor, which names them.

        Args:
            present: gangs that the engine itself tells of.
        """
        asked = {key: number for key, number in since.items() if key not in present}
        self._readers = {key: self._reader(key) for key in asked}
        return [event for key in asked for event in self._readers[key].after(asked[key])]

    def sweep(self, present: Collection[_Key]) -> None:
        """Removes old folders, from time to time."""
        if time.monotonic() >= self._swept_s + _SWEEP_S:
            self._swept_s = time.monotonic()
            self.remove_old(present)

    def remove_old(self, present: Collection[_Key]) -> None:
        """Removes the folders of gangs that were over for a week, or of the oldest of very many."""
        folders = [f for f in gang_folders(self._home) if (f.gang, f.epoch) not in present]
        changed = sorted(((_changed_s(f.path), f.path) for f in folders), reverse=True)
        for place, (changed_s, path) in enumerate(changed):
            if place >= _KEEP or time.time() - changed_s > _KEEP_S:
                shutil.rmtree(path, ignore_errors=True)

    def _reader(self, key: _Key) -> EventReader:
        known = self._readers.get(key)
        return known or EventReader(GangFolder(self._home.root, *key))


def _changed_s(path: Path) -> float:
    """When a folder last got or lost a file; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
