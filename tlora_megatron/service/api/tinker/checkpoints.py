"""Checkpoints that clients have asked for, as folders of the jobs that wrote them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tlora_megatron.service.api.tinker.names import Kind, ModelId, Refused, TinkerPath, UnknownId
from tlora_megatron.service.home import Home, remove_unheld
from tlora_megatron.service.store import CheckpointNote, Model, Store
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
INFLIGHT = "-inflight"
"""Ends the names of those whose sampler moves to the next ones of its kind."""
TTL_S = (3600, 10 * 366 * 86_400)
"""The least and the most that a client may let a checkpoint live."""
KEPT_FOR_SAMPLERS = 8
"""Weights that a model saved for one sampler alone, and versions that samplers hold while their
name leads elsewhere by now: so many of each, those that were used last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that is on the disk."""

    path: TinkerPath
    place: Path
    """Its name in the job's folder: a folder, or a link to a version."""
    folder: Path
    """Where that led when it was found."""
    note: CheckpointNote
    """What its client said of it."""

    @property
    def version(self) -> AdapterVersion | None:
        """The version that the name led to; None for a state."""
        return AdapterVersion.of(self.folder)

    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


class Checkpoints:
    """The checkpoints of one tenant."""

    def __init__(self, home: Home, store: Store, tenant: str) -> None:
        self._home = home
        self._jobs, self._sessions = store.jobs, store.sessions
        self._clock = store.database.clock
        self._tenant = tenant

    def note(
        self,
        path: TinkerPath,
        user_metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
    ) -> None:
        """Remembers what a client says of a checkpoint, and how long it may live."""
        now = self._clock()
        note = CheckpointNote(
            model=str(path.model),
            kind=path.kind,
            name=path.name,
            created_at=now,
            user_metadata=None if user_metadata is None else dict(user_metadata),
            expires_at=None if ttl_seconds is None else now + check_ttl(ttl_seconds),
        )
        self._sessions.note(note)

    def find(self, text: str) -> Saved:
        """The checkpoint of a path.

        Raises:
            UnknownId: if the tenant has none there, or it has expired.
        """
        path = TinkerPath.parse(text)
        model = self._sessions.model(str(path.model), tenant=self._tenant)
        found = [] if model is None else self._look(model, [path])
        if not found or self._has_expired(found[0]):
            raise UnknownId(f"a checkpoint must be one of the tenant's that is there, got {text!r}")
        return found[0]

    def newest_inflight(self, model: Model) -> AdapterVersion | None:
        """The version to which all inflight samplers of a model have moved; None: it has none."""
        folder = self._home.job(model.job) / FOLDER
        names = [folder / name for name in _names(folder) if name.endswith(INFLIGHT)]
        versions = (AdapterVersion.of(published_folder(name)) for name in names)
        return max((version for version in versions if version is not None), default=None)

    def place(self, saved: Saved) -> str:
        """Where a checkpoint is, as requests to jobs say it."""
        return saved.folder.relative_to(self._home.root).as_posix()

    def of(self, model: Model) -> list[Saved]:
        """The checkpoints of a model, oldest first, without those for one sampler alone."""
        paths = [path for path in self._paths(model) if not path.name.startswith(EPHEMERAL)]
        there = [saved for saved in self._look(model, paths) if not self._has_expired(saved)]
        return sorted(there, key=lambda saved: saved.note.created_at)

    def has_any(self, model: Model) -> bool:
        """True if a model has a checkpoint, also for one sampler alone, or by no name any more."""
        return bool(self._paths(model) or self._versions(model))

    def set_ttl(self, text: str, ttl_seconds: int | None) -> None:
        """Lets a checkpoint expire;

        None = never. Refuses one that is not there, or a life too long.
        """
        saved = self.find(text)
        expires_at = None if ttl_seconds is None else self._clock() + check_ttl(ttl_seconds)
        self._sessions.note(replace(saved.note, expires_at=expires_at))

    def remove(self, saved: Saved) -> None:
        """Deletes what was found, as a whole at once. Versions are deleted by `sweep`.

        One that is a folder and is sampled from just now has expired, and goes with a later sweep.
        """
        if saved.place.is_symlink():
            saved.place.unlink(missing_ok=True)
        elif not remove_unheld(saved.place):
            self._sessions.note(replace(saved.note, expires_at=self._clock()))
            return
        self._sessions.forget_note(saved.note.model, saved.note.kind, saved.note.name)

    def folder(self, version: AdapterVersion) -> Path:
        return version.folder(self._home.jobs)

    def sampled_folder(self, version: AdapterVersion) -> Path:
        return version.sampled_folder(self._home.jobs)

    def sweep(self, model: Model, *, keep: int, is_over: bool) -> None:
        """Deletes what has expired, and what was saved for samplers that are not there any more.

        What something is drawn with now stays, and what an unfinished job begins with.

        Args:
            keep: weights for one sampler alone that stay.
            is_over: the model's job publishes nothing more.
        """
        # Names first: who pins a version notes that, and then looks if its name has moved.
        saved, versions = self._look(model, self._paths(model)), self._versions(model)
        used = self._versions_in_use() if versions else {}
        gone = [one for one in saved if self._has_expired(one)]
        gone += _unused([one for one in saved if one not in gone], keep, used)
        for one in gone:
            self.remove(one)
        named = {one.version for one in saved if one not in gone}
        newest = max((one.version for one in saved if one.version is not None), default=None)
        loose = [
            version
            for version in versions
            # A later one may have been written just now: its name comes next.
            if version not in named and (is_over or (newest is not None and version < newest))
        ]
        kept = sorted((version for version in loose if version in used), key=used.__getitem__)
        unfinished = str(self._jobs.documents_with_folders()) if loose else ""
        for version in loose:
            folder = self.folder(version)
            if version not in kept[-KEPT_FOR_SAMPLERS:] and str(folder) not in unfinished:
                remove_unheld(folder)

    def _versions(self, model: Model) -> list[AdapterVersion]:
        """All versions of a model's weights for samplers that are on the disk, oldest first."""
        return versions_of(self._home.job(model.job))

    def _versions_in_use(self) -> dict[AdapterVersion, float]:
        """Versions that samplers of open sessions sample from, and when they last did."""
        found: dict[AdapterVersion, float] = {}
        for sampler in self._sessions.pinned(self._tenant):
            version = AdapterVersion.parse(str(sampler.version))
            found[version] = max(self._sessions.heard_at(sampler), found.get(version, 0.0))
        return found

    def _has_expired(self, saved: Saved) -> bool:
        return saved.note.expires_at is not None and saved.note.expires_at <= self._clock()

    def _look(self, model: Model, paths: Sequence[TinkerPath]) -> list[Saved]:
        """Those of some paths that are on the disk, also if they have expired."""
        found, notes = [], self._sessions.notes(model.id) if paths else {}
        for path in paths:
            name = folder_name(path.kind, path.name)
            place = self._home.job(model.job) / FOLDERS[path.kind] / name
            folder = published_folder(place)
            if folder.is_dir():
                note = notes.get((path.kind, path.name)) or CheckpointNote(
                    model=model.id,
                    kind=path.kind,
                    name=path.name,
                    created_at=folder.stat().st_mtime,
                )
                found.append(Saved(path=path, place=place, folder=folder, note=note))
        return found

    def _paths(self, model: Model) -> list[TinkerPath]:
        """Paths of all folders with checkpoints of a model."""
        job = self._home.job(model.job)
        places = [
            f"jobs/{model.job}/{folder}/{name}"
            for folder in dict.fromkeys(FOLDERS.values())
            for name in _names(job / folder)
        ]
        return [path_of(ModelId.of(model), place) for place in places]


def _unused(saved: Sequence[Saved], keep: int, used: Mapping[AdapterVersion, float]) -> list[Saved]:
    """Weights for one sampler alone but those that were made or used last."""

    def used_s(one: Saved) -> float:
        at_s = 0.0 if one.version is None else used.get(one.version, 0.0)
        return max(one.note.created_at, at_s)

    alone = [one for one in saved if one.path.name.startswith(EPHEMERAL)]
    return sorted(alone, key=used_s)[: max(0, len(alone) - keep)]


def path_of(model: ModelId, place: str) -> TinkerPath:
    """The path under which a client knows `jobs/ID/states/NAME` or `jobs/ID/sampler/NAME`."""
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
    """The seconds, if a checkpoint may live so long; raises `Refused` if it may not."""
    least, most = TTL_S
    if not least <= ttl_seconds <= most:
        raise Refused(f"ttl_seconds must be from {least} to {most}, got {ttl_seconds}")
    return ttl_seconds
