"""Sessions of a tenant's clients as files: they outlive the process that serves HTTP.

tenants/TENANT/tinker/SESSION/session.json        who came, and why it ended
tenants/TENANT/tinker/SESSION/beat                its time is that of the last heartbeat
tenants/TENANT/tinker/SESSION/models/N.json       a model, with the id of its job
tenants/TENANT/tinker/SESSION/samplers/N.json     what a sampler samples from
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Self

from tlora_megatron.files import read_json, write_json
from tlora_megatron.service.api.tinker.refusals import UnknownId
from tlora_megatron.service.api.tinker.state.names import (
    ModelId,
    SamplerId,
    check_session,
    new_session,
)
from tlora_megatron.service.home import make_folder
from tlora_megatron.training.saving.writer import AdapterVersion

SILENCE_S = 300.0
"""Seconds without a heartbeat after which a client counts as gone; the SDK sends one every 10 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A value that is a file."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The value of a file; None if there is none. Keys of newer versions are passed over."""
        value = read_json(path)
        if value is None:
            return None
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: entry for key, entry in value.items() if key in known})

    def write(self, path: Path) -> None:
        """Replaces the file."""
        make_folder(path.parent)
        write_json(path, asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Session(Record):
    """A client between its start and its end."""

    id: str
    created_at: float
    sdk_version: str
    display_name: str | None = None
    user_metadata: Mapping[str, str] | None = None
    ended: str | None = None
    """Why no more is taken from it; None = it goes on."""
    ended_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Model(Record):
    """A model as its client asked for it."""

    id: str
    job: str
    """Id of the job that trains it; empty until it is submitted."""
    base: str
    """Name of the base model."""
    created_at: float
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    """Remembered, for nothing adapts the unembedding here."""
    user_metadata: Mapping[str, str] | None = None
    loaded_from: str | None = None
    """Checkpoint that it was made from: its load is the first request of the job's journal."""
    left: int | None = None
    """Number in the journal from which on it says goodbye; None = it takes requests."""

    @property
    def model_id(self) -> ModelId:
        """Its id in parts."""
        return ModelId.parse(self.id)

    def number(self, seq_id: int) -> int:
        """Number in the job's journal of what its client counts as `seq_id`."""
        return seq_id + (self.loaded_from is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledFrom(Record):
    """The base or the weights that a sampler samples from."""

    id: str
    base: str
    model_path: str | None = None
    """A `tinker://` path; None = the base alone."""
    version: str | None = None
    """The `AdapterVersion` to which that path led when the client was made: it stays at this one.
    None = the base alone, or weights from before there were versions."""
    clients: int = field(default=0)
    """Copies of the client that have joined, beside the first."""


class Sessions:
    """The sessions of one tenant.

    Args:
        folder: the tenant's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tinker"

    def create(
        self,
        sdk_version: str,
        display_name: str | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Session:
        """Begins a session."""
        session = Session(
            id=new_session(),
            created_at=time.time(),
            sdk_version=sdk_version,
            display_name=display_name,
            user_metadata=user_metadata,
        )
        self._write(session)
        self._beat_file(session.id).touch(mode=0o600)
        return session

    def get(self, session_id: str) -> Session:
        """The session of an id.

        Raises:
            UnknownId: if the tenant has none.
        """
        found = Session.read(self._of(session_id) / "session.json")
        if found is None:
            raise UnknownId(f"session_id must be one of the tenant's, got {session_id!r:.200}")
        return found

    def beat(self, session_id: str) -> None:
        """Notes that the client is there.

        Raises:
            UnknownId: if the tenant has no such session.
        """
        try:
            os.utime(self._beat_file(session_id))
        except FileNotFoundError:
            self.get(session_id)
            self._beat_file(session_id).touch(mode=0o600)

    def silence(self, session_id: str) -> float:
        """Seconds since the client was heard of."""
        try:
            return time.time() - self._beat_file(session_id).stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def end(self, session_id: str, why: str) -> None:
        """Takes no more requests of the session; the first reason stays."""
        session = self.get(session_id)
        if session.ended is None:
            self._write(replace(session, ended=why, ended_at=time.time()))

    def ended_for(self, session: Session) -> float:
        """Seconds since the end of a session that has ended."""
        if session.ended_at is None:
            return self.silence(session.id)
        return time.time() - session.ended_at

    def remove(self, session_id: str) -> None:
        """Deletes a session and all that is in its folder; nobody sees a half of it."""
        aside = self.folder / f".{check_session(session_id)}"
        with suppress(FileNotFoundError):
            os.rename(self._of(session_id), aside)
        self.finish_removals()

    def finish_removals(self) -> None:
        """Deletes what a death has left of removed sessions."""
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            if entry.name.startswith("."):
                shutil.rmtree(entry.path, ignore_errors=True)

    def all(self) -> list[Session]:
        """The sessions, newest first."""
        files = (self._of(name) / "session.json" for name in self._names())
        found = [session for file in files if (session := Session.read(file)) is not None]
        return sorted(found, key=lambda session: session.created_at, reverse=True)

    def add_model(self, model: Model) -> None:
        """Remembers a model."""
        model.write(self._model_file(model.model_id))

    def find_model(self, model: ModelId) -> Model | None:
        """The model of an id; None if it was not made."""
        return Model.read(self._model_file(model))

    def model(self, model_id: str) -> Model:
        """The model of an id.

        Raises:
            UnknownId: if the tenant has none.
        """
        found = self.find_model(ModelId.parse(model_id))
        if found is None or not found.job:
            raise UnknownId(f"model_id must be one of the tenant's, got {model_id!r:.200}")
        return found

    def models(self, session_id: str | None = None) -> list[Model]:
        """The models of a session, or of all, newest first."""
        names = self._names() if session_id is None else [check_session(session_id)]
        files = [file for name in names for file in self._files(name, "models")]
        found = [model for file in files if (model := Model.read(file)) is not None]
        return sorted(found, key=lambda model: model.created_at, reverse=True)

    def add_sampler(self, sampler: SampledFrom) -> None:
        """Remembers what a sampler samples from."""
        sampler.write(self._sampler_file(SamplerId.parse(sampler.id)))

    def find_sampler(self, sampler_id: str) -> SampledFrom | None:
        """The sampler of an id; None if it was not made."""
        return SampledFrom.read(self._sampler_file(SamplerId.parse(sampler_id)))

    def sampler(self, sampler_id: str) -> SampledFrom:
        """The sampler of an id.

        Raises:
            UnknownId: if the tenant has none.
        """
        found = self.find_sampler(sampler_id)
        if found is None:
            raise UnknownId(f"sampling_session_id must be one of the tenant's, got {sampler_id!r}")
        return found

    def join_sampler(self, sampler_id: str) -> int:
        """Counts a copy of a sampler's client; returns its number, from 1."""
        sampler = self.sampler(sampler_id)
        sampler = replace(sampler, clients=sampler.clients + 1)
        self.add_sampler(sampler)
        return sampler.clients

    def note_use(self, sampler_id: str) -> None:
        """Notes that a sampler is asked something."""
        os.utime(self._sampler_file(SamplerId.parse(sampler_id)))

    def versions_in_use(self) -> dict[AdapterVersion, float]:
        """Versions that samplers of open sessions sample from, and when they last did."""
        found: dict[AdapterVersion, float] = {}
        for session in self.all():
            for file in self._files(session.id, "samplers") if session.ended is None else ():
                sampler = SampledFrom.read(file)
                if sampler is not None and sampler.version is not None:
                    version, used_s = AdapterVersion.parse(sampler.version), file.stat().st_mtime
                    found[version] = max(used_s, found.get(version, 0.0))
        return found

    def samplers(self, session_id: str) -> list[str]:
        """Ids of a session's samplers."""
        files = self._files(check_session(session_id), "samplers")
        return sorted(str(SamplerId(session_id, int(file.stem))) for file in files)

    def samples(self, sampler: SamplerId) -> Path:
        """Folder of what was asked of a sampler, and answered; not made here."""
        return self.all_samples(sampler.session) / str(sampler.number)

    def all_samples(self, session_id: str) -> Path:
        """Folder of the samples of all samplers of a session; not made here."""
        return self._of(session_id) / "samples"

    def facts(self, model: ModelId) -> Path:
        """Folder of what clients say of a model's checkpoints; not made here."""
        return self._of(model.session) / "checkpoints" / str(model.number)

    def _of(self, session_id: str) -> Path:
        return self.folder / check_session(session_id)

    def _write(self, session: Session) -> None:
        session.write(self._of(session.id) / "session.json")

    def _beat_file(self, session_id: str) -> Path:
        return self._of(session_id) / "beat"

    def _model_file(self, model: ModelId) -> Path:
        return self._of(model.session) / "models" / f"{model.number}.json"

    def _sampler_file(self, sampler: SamplerId) -> Path:
        return self._of(sampler.session) / "samplers" / f"{sampler.number}.json"

    def _names(self) -> Iterator[str]:
        if self.folder.is_dir():
            entries = (entry for entry in os.scandir(self.folder) if entry.is_dir())
            yield from (entry.name for entry in entries if not entry.name.startswith("."))

    def _files(self, session_id: str, kind: str) -> list[Path]:
        return list((self._of(session_id) / kind).glob("*.json"))
