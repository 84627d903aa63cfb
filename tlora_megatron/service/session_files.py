"""Takes up the sessions that versions before table version 4 kept as JSON files.

Below `tenants/TENANT/tinker/SESSION`: `session.json`; `beat`, whose time is that of the last
heartbeat; `models/N.json`; `samplers/N.json`; `checkpoints/N/KIND/NAME.json`, a client's words.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from tlora_megatron.files import read_json
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.store import (
    CheckpointNote,
    Model,
    NotFound,
    Sampler,
    Session,
    Store,
)

ASIDE = "before_store"
"""In a session's folder: its files, once all they say is in the store."""
_FILES = ("models", "samplers", "checkpoints", "beat", "session.json")
"""Moved in this order: as long as the last one is there, the session is looked at again."""


def take_up_sessions(home: Home, store: Store) -> list[str]:
    """Writes what files say of sessions into the store, in one transaction, and moves them aside.

    They are moved behind the commit, and a session that the store has is not read again. Samples
    stay.

    Returns:
        Sentences: how many sessions were taken up, and which cannot be read and stay.
    """
    for removed in home.tenants.glob("*/tinker/.s*"):
        shutil.rmtree(removed, ignore_errors=True)
    taken, unreadable = [], []
    with store.transaction():
        for file in sorted(home.tenants.glob("*/tinker/*/session.json")):
            try:
                with store.part():
                    _take_up(store, file.parent)
                taken.append(file.parent)
            except (ValueError, KeyError, TypeError, OSError, NotFound) as error:
                unreadable.append(
                    f"session {file.parent.name} must be whole to be taken up from its files, got "
                    f"{type(error).__name__}: {error}"
                )
    for folder in taken:
        aside = make_folder(folder / ASIDE)
        for name in _FILES:
            with suppress(FileNotFoundError):
                os.rename(folder / name, aside / name)
    if taken:
        return [f"took up {len(taken)} sessions of Tinker's clients from their files", *unreadable]
    return unreadable


def _take_up(store: Store, folder: Path) -> None:
    """Writes the rows of one session."""
    tenant, session = folder.parent.parent.name, folder.name
    if store.sessions.get(session, tenant=tenant) is not None:
        return
    said, beat = read_json(folder / "session.json"), folder / "beat"
    heard_at = beat.stat().st_mtime if beat.exists() else said["created_at"]
    store.sessions.add(_row(Session, said, tenant=tenant, heard_at=heard_at))
    for file in (folder / "samplers").glob("*.json"):
        at = {"session": session, "number": int(file.stem), "heard_at": file.stat().st_mtime}
        store.sessions.put_sampler(_row(Sampler, read_json(file), tenant=tenant, **at))
    for file in (folder / "models").glob("*.json"):
        said = read_json(file)
        job = said["job"] or _job_named(store, f"{session}-train-{file.stem}", tenant)
        if job is not None:
            at = {"session": session, "number": int(file.stem), "job": store.jobs.get(job).id}
            model = _row(Model, said, tenant=tenant, last_request=said.get("left"), **at)
            store.sessions.add_model(model)
            for note in (folder / "checkpoints" / file.stem).glob("*/*.json"):
                of = {"model": model.id, "kind": note.parent.name, "name": note.stem}
                store.sessions.note(_row(CheckpointNote, read_json(note), **of))


def _job_named(store: Store, name: str, tenant: str) -> str | None:
    """The job of a model whose making was cut off; None if that was before its job was there."""
    with suppress(NotFound):
        return store.jobs.find(name, tenant=tenant).id
    return None


def _row(kind: type[Any], said: Mapping[str, Any], /, **more: Any) -> Any:
    """A row with the fields that a file has, and some more; other keys are passed over."""
    names = {entry.name for entry in fields(kind)}
    return kind(**{key: value for key, value in said.items() if key in names} | more)
