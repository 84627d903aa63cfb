"""The requests of a client, and what their answers mean; nothing here sends any."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx

from tlora_megatron.client.values import Job, JobState, Page, Submitted

T = TypeVar("T")
Wish = Literal["cancel", "pause", "resume"]
Params = Mapping[str, str | int | bool | list[str]]
PAGE = 1000
"""Jobs of a page where all are asked for."""
_CONNECT_S = 10.0
ANSWER = httpx.Timeout(60.0, connect=_CONNECT_S)
STREAM = httpx.Timeout(60.0, connect=_CONNECT_S)
"""A stream that says nothing for so long is opened anew; the service sends signs of life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[T]):
    """One request that may be sent again: twice has the effect of once."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    """Makes the result of an answer that is no error."""
    params: Params = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Any = None
    content: bytes | None = None


def with_token(token: str) -> dict[str, str]:
    """The headers of every request of a client."""
    return {"Authorization": f"Bearer {token}"}


def submit(document: Mapping[str, Any] | str, key: str | None) -> Call[Submitted]:
    """Submits the jobs of a document, a mapping or a text in YAML."""
    # Without a key of the caller this one: a retry must not make the jobs twice.
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    content = None
    if isinstance(document, str):
        content = document.encode()
        headers["Content-Type"] = "application/yaml"
    return Call(
        method="POST",
        path="/v1/jobs",
        read=_submitted,
        headers=headers,
        json=None if isinstance(document, str) else dict(document),
        content=content,
    )


def page(
    states: Sequence[str] | None, after: str | None, limit: int, *, newest_first: bool = False
) -> Call[Page]:
    """Lists jobs, a page at a time."""
    params: dict[str, Any] = {"limit": limit, "counts": True}
    if newest_first:
        params["newest_first"] = True
    if states is not None:
        params["state"] = [str(state) for state in states]
    if after is not None:
        params["after"] = after
    return Call(method="GET", path="/v1/jobs", read=_page, params=params)


def job(name: str) -> Call[Job]:
    """Looks at one job."""
    return Call(method="GET", path=_path(name), read=_job)


def wish(name: str, asked: Wish) -> Call[Job]:
    """Asks to end or hold a job, or to let it go on."""
    if asked == "cancel":
        return Call(method="DELETE", path=_path(name), read=_job)
    return Call(method="POST", path=_path(name, asked), read=_job)


def view(name: str, params: Params | None = None) -> Call[dict[str, Any]]:
    """Asks for cluster, groups or decisions."""
    return Call(method="GET", path=f"/v1/{name}", read=_mapping, params=params or {})


def metrics(name: str, tail: int) -> Call[list[dict[str, Any]]]:
    """Asks for the last steps and evaluations of a job."""
    return Call(method="GET", path=_path(name, "metrics"), read=_rows, params={"tail": tail})


def events(name: str, last: str | None, *, follow: bool) -> Call[None]:
    """Asks for a job's history as a stream."""
    headers = {"Accept": "text/event-stream"} | ({} if last is None else {"Last-Event-ID": last})
    return Call(
        method="GET",
        path=_path(name, "events"),
        read=lambda _: None,
        params={"follow": follow},
        headers=headers,
    )


def adapter(name: str) -> Call[None]:
    """Asks for the adapter of a finished job as an archive."""
    return Call(method="GET", path=_path(name, "adapter.zip"), read=lambda _: None)


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_id(answer: httpx.Response) -> str | None:
    """The id of a file that was uploaded, or of the first one listed; None: none is."""
    body = answer.json()
    rows = body.get("data", [body])
    return str(rows[0]["id"]) if rows else None


def _path(name: str, *more: str) -> str:
    """A job's path. A name that is a step of paths would be walked, not asked for."""
    if name in ("", ".", ".."):
        raise ValueError(f"a job must be named by its id or name, got {name!r}")
    return "/".join(["/v1/jobs", quote(name, safe=""), *more])


def _submitted(answer: httpx.Response) -> Submitted:
    body = answer.json()
    return Submitted(
        jobs=tuple(Job.read(row) for row in body["jobs"]),
        is_new=answer.status_code == httpx.codes.CREATED,
        warnings=tuple(body.get("warnings", ())),
        served=bool(body.get("served", True)),
    )


def _page(answer: httpx.Response) -> Page:
    body = answer.json()
    return Page(
        jobs=tuple(Job.read(row) for row in body["jobs"]),
        next=body.get("next"),
        counts={JobState(state): count for state, count in (body.get("counts") or {}).items()},
        served=bool(body.get("served", True)),
    )


def _job(answer: httpx.Response) -> Job:
    return Job.read(answer.json())


def _mapping(answer: httpx.Response) -> dict[str, Any]:
    return dict(answer.json())


def _rows(answer: httpx.Response) -> list[dict[str, Any]]:
    return list(answer.json()["rows"])
