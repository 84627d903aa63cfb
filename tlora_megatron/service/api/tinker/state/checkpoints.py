"""Checkpoints that clients have asked for, as folders of the jobs that wrote them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tlora_megatron.service.api.tinker.refusals import Refused, UnknownId
from tlora_megatron.service.api.tinker.state.names import Kind, ModelId, TinkerPath
from tlora_megatron.service.api.tinker.state.sessions import Model, Record, Sessions
from tlora_megatron.service.home import Home, remove_folder
from tlora_megatron.training.saving.writer import (
    FOLDER,
    AdapterVersion,
    published_folder,
    versions_of,
)

FOLDERS: Mapping[Kind, str] = {
    "weights": "states",
    "sampler_weights": FOLDER,
    "external_weights": FOLDER,
}
"""Kind of a checkpoint -> its folder in the job's."""
EXTERNAL = "external-"
"""Begins the names of folders with weights that were saved to be taken away."""
EPHEMERAL = "session-"
"""Begins the names of weights that were saved for one sampler alone; lists leave them out."""
TTL_S = (3600, 10 * 366 * 86_400)
"""The least and the most that a client may let a checkpoint live."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(Record):
    """A client's own words about a checkpoint."""

    created_at: float
    user_metadata: Mapping[str, str] | None = None
    expires_at: float | None = None

    @property
    def has_expired(self) -> bool:
        """True once its time is over."""
        return self.expires_at is not None and self.expires_at <= time.time()


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that is on the disk."""

    path: TinkerPath
    place: Path
    """Its name in the job's folder: a folder, or a link to a version."""
    folder: Path
    """Where that led when it was found."""
    facts: Facts

    @property
    def version(self) -> AdapterVersion | None:
        """The version that the name led to; None for a state."""
        return AdapterVersion.of(self.folder)

    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


class Checkpoints:
    """The checkpoints of one tenant."""

    def __init__(self, home: Home, sessions: Sessions) -> None:
        self._home = home
        self._sessions = sessions

    def note(
        self,
        path: TinkerPath,
        user_metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
    ) -> None:
        """Remembers what a client says of a checkpoint that it asks for.

        Raises:
            Refused: if it may not live so long.
        """
        now = time.time()
        expires_at = None if ttl_seconds is None else now + check_ttl(ttl_seconds)
        facts = Facts(created_at=now, user_metadata=user_metadata, expires_at=expires_at)
        facts.write(self._facts_file(path))

    def find(self, text: str) -> Saved:
        """The checkpoint of a path.

        Raises:
            UnknownId: if the tenant has none there, or it has expired.
        """
        path = TinkerPath.parse(text)
        model = self._sessions.find_model(path.model)
        found = self._saved(path, model) if model is not None and model.job else None
        if found is None:
            raise UnknownId(f"a checkpoint must be one of the tenant's that is there, got {text!r}")
        return found

    def place(self, saved: Saved) -> str:
        """Where a checkpoint is, as requests of the journal say it."""
        return saved.folder.relative_to(self._home.root).as_posix()

    def of(self, model: Model) -> list[Saved]:
        """The checkpoints of a model, oldest first, without those for one sampler alone."""
        paths = [path for path in self._paths(model) if not path.name.startswith(EPHEMERAL)]
        there = [saved for path in paths if (saved := self._saved(path, model)) is not None]
        return sorted(there, key=lambda saved: saved.facts.created_at)

    def has_any(self, model: Model) -> bool:
        """True if a model has a checkpoint, also for one sampler alone, or by no name any more."""
        return bool(self._paths(model) or self.versions(model))

    def set_ttl(self, text: str, ttl_seconds: int | None) -> None:
        """Lets a checkpoint expire; None = never.

        Raises:
            UnknownId: if the tenant has none there.
            Refused: if it may not live so long.
        """
        saved = self.find(text)
        expires_at = None if ttl_seconds is None else time.time() + check_ttl(ttl_seconds)
        replace(saved.facts, expires_at=expires_at).write(self._facts_file(saved.path))

    def delete(self, text: str) -> None:
        """Deletes a checkpoint.

        Raises:
            UnknownId: if the tenant has none there.
        """
        self.remove(self.find(text))

    def remove(self, saved: Saved) -> None:
        """Deletes what was found; nobody sees a half of it. A version has its time for itself."""
        if saved.place.is_symlink():
            saved.place.unlink(missing_ok=True)
        else:
            remove_folder(saved.place)
        self._facts_file(saved.path).unlink(missing_ok=True)

    def names(self, model: Model) -> list[Saved]:
        """All that a model has saved by name, also what has expired."""
        return [found for path in self._paths(model) if (found := self._look(path, model))]

    def versions(self, model: Model) -> list[AdapterVersion]:
        """All versions of a model's weights for samplers that are on the disk, oldest first."""
        return versions_of(self._home.job(model.job))

    def versions_in_use(self) -> dict[AdapterVersion, float]:
        """See `Sessions`."""
        return self._sessions.versions_in_use()

    def folder(self, version: AdapterVersion) -> Path:
        """The folder of a version."""
        return version.folder(self._home.jobs)

    def _saved(self, path: TinkerPath, model: Model) -> Saved | None:
        found = self._look(path, model)
        return None if found is None or found.facts.has_expired else found

    def _look(self, path: TinkerPath, model: Model) -> Saved | None:
        place = self._home.job(model.job) / FOLDERS[path.kind] / folder_name(path.kind, path.name)
        folder = published_folder(place)
        if not folder.is_dir():
            return None
        facts = Facts.read(self._facts_file(path)) or Facts(created_at=folder.stat().st_mtime)
        return Saved(path=path, place=place, folder=folder, facts=facts)

    def _paths(self, model: Model) -> list[TinkerPath]:
        """Paths of all folders with checkpoints of a model."""
        job = self._home.job(model.job)
        places = [
            f"jobs/{model.job}/{folder}/{name}"
            for folder in dict.fromkeys(FOLDERS.values())
            for name in _names(job / folder)
        ]
        return [path_of(model.model_id, place) for place in places]

    def _facts_file(self, path: TinkerPath) -> Path:
        return self._sessions.facts(path.model) / path.kind / f"{path.name}.json"


def path_of(model: ModelId, place: str) -> TinkerPath:
    """The path that a client is told of `jobs/ID/states/NAME` or `jobs/ID/sampler/NAME`."""
    _, _, folder, name = place.split("/")
    if folder == FOLDERS["weights"]:
        return TinkerPath(model, "weights", name)
    if name.startswith(EXTERNAL):
        return TinkerPath(model, "external_weights", name.removeprefix(EXTERNAL))
    return TinkerPath(model, "sampler_weights", name)


def folder_name(kind: Kind, name: str) -> str:
    """Name of a checkpoint's folder."""
    return f"{EXTERNAL}{name}" if kind == "external_weights" else name


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def check_ttl(ttl_seconds: int) -> int:
    """The seconds, if a checkpoint may live so long.

    Raises:
        Refused: if it may not.
    """
    least, most = TTL_S
    if not least <= ttl_seconds <= most:
        raise Refused(f"ttl_seconds must be from {least} to {most}, got {ttl_seconds}")
    return ttl_seconds
