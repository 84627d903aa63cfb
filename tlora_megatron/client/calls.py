"""The requests of a client, where they go, when again, and what answers mean."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import os
import random
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from tlora_megatron.client.values import Event, Job, Page, ServiceError, Submitted, Unreachable
from tlora_megatron.config.job_rows import Acted, Action, JobState, RequestedAction, is_address

TOKEN_VARIABLE = "TLORA_TOKEN"
TOKEN_FILE = "~/.tlora/token"
"""Holds the token, closed to other users, where the variable is not set."""
OWN_TOKEN_FILE = "~/.tlora/http_token"
"""The file that `tlora serve --http` makes; for services of this host alone."""


def connection(address: str, token: str | None) -> dict[str, Any]:
    """How httpx is to connect to a service."""
    headers = {"Authorization": f"Bearer {token or find_token(address)}"}
    return {"base_url": address, "headers": headers, "timeout": ANSWER}


def check_address(address: str) -> str:
    """The address up to its path; raises `ValueError` if it is none, or has a password."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if not is_address(address) or not parts.hostname or port == 0:
        raise ValueError(f"the service must be like http://host:8017, got {address!r:.200}")
    if parts.username or parts.query:
        raise ValueError(
            f"the address of a service must hold neither user nor query, got one of "
            f"{parts.hostname}: the token comes from {TOKEN_VARIABLE} or {TOKEN_FILE}"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def find_token(address: str) -> str:
    """The token from the environment, or a file that others cannot read, or else a `ValueError`."""
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if given:
        return given
    places = [TOKEN_FILE, OWN_TOKEN_FILE] if _is_here(address) else [TOKEN_FILE]
    for place in places:
        path = Path(place).expanduser()
        if path.is_file():
            return _read(path)
    raise ValueError(
        f"a token for {address} must be given, got none: set {TOKEN_VARIABLE}, or write it into "
        f"{TOKEN_FILE} with mode 0600; `tlora token create` makes one"
    )


def _read(path: Path) -> str:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(
            f"{path} must be closed to other users, got mode "
            f"{stat.S_IMODE(path.stat().st_mode):04o}; chmod 600 closes it"
        )
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"{path} must hold a token, got an empty file")
    return token


def _is_here(address: str) -> bool:
    """True of addresses that lead to this host alone."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(slots=True)
class EventReader:
    """Takes the lines of a stream, gives events when they are whole, and counts its failures."""

    address: str
    retries: int
    """How often a stream may fail in turn before it has given anything."""
    last: str | None = None
    """Id of the last event, with which a stream goes on."""
    is_over: bool = False
    """The service has said that nothing will follow."""
    _failures: int = 0
    _begin: str | None = None
    _id: str | None = None
    _name: str = ""
    _data: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin = self.last

    def feed(self, line: str) -> Event | None:
        """Takes one line without its end; the event that it completes, if it does."""
        if not line:
            return self._end()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self._id = value
        elif name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        return None

    def cut(self, error: Exception) -> None:
        """Forgets an event that did not arrive as a whole; raises what ends the attempts."""
        self._data.clear()
        self._id, self._name = None, ""
        self._failures = 0 if self.last != self._begin else self._failures + 1
        if self._failures > self.retries or not may_pass(error):
            raise given_up(self.address, error) from error

    def pause_s(self) -> float:
        """Seconds to wait before the stream is opened again."""
        self._begin = self.last
        return next(waits(1)) * (1 + self._failures)

    def _end(self) -> Event | None:
        data, self._data = "\n".join(self._data), []
        name = self._name
        self.last = self._id if self._id is not None else self.last
        self._id, self._name = None, ""
        if name == "end":
            self.is_over = True
        if not data or name:
            return None
        return Event(self.last or "", json.loads(data))


logger = logging.getLogger(__name__)

FAILURES = (httpx.TransportError, ServiceError)
"""Exceptions that an attempt may end with."""
_PASSING = (429, 502, 503, 504)
"""Statuses of a service that may answer otherwise soon."""
_LONGEST_ASKED_S = 60.0
_FIRST_S, _LONGEST_S = 0.25, 8.0


def waits(retries: int) -> Iterator[float]:
    """Seconds to wait before each retry: longer and longer, and unlike those of other clients."""
    for attempt in range(retries):
        whole = min(_LONGEST_S, _FIRST_S * 2**attempt)
        yield whole * (1 - 0.5 * random.random())


def refusal(answer: httpx.Response) -> ServiceError:
    """The error of an answer whose body has been read."""
    try:
        found = answer.json()["error"]
        message, param = str(found["message"]), found.get("param")
    except (ValueError, TypeError, KeyError, AttributeError):
        message, param = f"the service must answer, got status {answer.status_code}", None
    asked_s = 0.0
    with suppress(ValueError):
        asked_s = min(float(answer.headers.get("retry-after", 0)), _LONGEST_ASKED_S)
    return ServiceError(answer.status_code, message, param, asked_s)


def may_pass(error: Exception) -> bool:
    """True of what another attempt may mend."""
    return not isinstance(error, ServiceError) or error.status in _PASSING


class Attempts:
    """The attempts at one request."""

    def __init__(self, address: str, retries: int) -> None:
        self._address = address
        self._left = waits(retries)
        self._is_first = True

    def pause_s(self, error: Exception) -> float:
        """Seconds to wait behind an error; raises the last one, and what another cannot mend."""
        planned = next(self._left, None)
        if planned is None or not may_pass(error):
            raise given_up(self._address, error) from error
        if self._is_first and not isinstance(error, ServiceError):
            logger.warning(
                "nothing answers at %s (%s); it is asked again for some seconds. Is the address "
                "right, and does `tlora serve --http` run there?",
                self._address,
                error,
            )
        self._is_first = False
        return max(planned, error.wait_s) if isinstance(error, ServiceError) else planned


def given_up(address: str, error: Exception) -> Exception:
    """The error when all attempts have failed."""
    if isinstance(error, ServiceError):
        return error
    told = str(error) or type(error).__name__
    return Unreachable(
        f"the service must answer at {address}, got {told}; check the address, or start one there "
        "with: tlora serve --http PORT"
    )


T = TypeVar("T")
Params = Mapping[str, str | int | bool | list[str]]
PAGE = 1000
"""Jobs of a page where all are asked for."""
_CONNECT_S = 10.0
ANSWER = httpx.Timeout(60.0, connect=_CONNECT_S)
STREAM = httpx.Timeout(60.0, connect=_CONNECT_S)
"""A stream that says nothing for so long is opened anew; the service sends signs of life."""


@dataclass(frozen=True, slots=True)
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

    def words(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "url": self.path,
            **{name: getattr(self, name) for name in ("params", "headers", "json", "content")},
        }


def submit(document: Mapping[str, Any] | str, key: str | None) -> Call[Submitted]:
    """Submits the jobs of a document, a mapping or a text in YAML."""
    # Without a key of the caller this one: a retry must not make the jobs twice.
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    content = None
    if isinstance(document, str):
        content = document.encode()
        headers["Content-Type"] = "application/yaml"
    values = None if isinstance(document, str) else dict(document)
    return Call("POST", "/v1/jobs", _submitted, headers=headers, json=values, content=content)


def submit_sweep(document: Mapping[str, Any], key: str | None) -> Call[dict[str, Any]]:
    """Submits the trials of a sweep."""
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    return Call("POST", "/v1/sweeps", _object, headers=headers, json=dict(document))


def page(
    states: Sequence[str] | None,
    after: str | None,
    limit: int,
    *,
    newest_first: bool = False,
    **more: str | bool | None,
) -> Call[Page]:
    """Asks for a page of jobs; `more` are parameters of the route."""
    params: dict[str, Any] = {"limit": limit, "counts": True}
    params |= {name: value for name, value in more.items() if value is not None}
    if newest_first:
        params["newest_first"] = True
    if states is not None:
        params["state"] = [str(state) for state in states]
    if after is not None:
        params["after"] = after
    return Call("GET", "/v1/jobs", _page, params)


def job(name: str) -> Call[Job]:
    return Call("GET", _path(name), _job)


def request_action(name: str, asked: RequestedAction) -> Call[Job]:
    """Asks to end or hold a job, or to let it go on."""
    if asked == "cancel":
        return Call("DELETE", _path(name), _job)
    return Call("POST", _path(name, asked), _job)


def act(action: Action, jobs: Sequence[str]) -> Call[Acted[Job]]:
    """Asks something of many jobs, or removes them; each on its own."""
    body = {"action": action, "jobs": list(jobs)}
    return Call("POST", "/v1/jobs/act", _acted, json=body)


def view(name: str, params: Params | None = None) -> Call[dict[str, Any]]:
    return Call("GET", f"/v1/{name}", _object, params or {})


def metrics(name: str, tail: int) -> Call[list[dict[str, Any]]]:
    path, params = _path(name, "metrics"), {"tail": tail}
    return Call("GET", path, lambda answer: list(answer.json()["rows"]), params)


def events(name: str, last: str | None, *, follow: bool) -> Call[None]:
    """Asks for a job's history as a stream."""
    headers = {"Accept": "text/event-stream"} | ({} if last is None else {"Last-Event-ID": last})
    return Call("GET", _path(name, "events"), lambda _: None, {"follow": follow}, headers)


def adapter(name: str) -> Call[None]:
    """Asks for the adapter of a finished job as an archive."""
    return Call("GET", _path(name, "adapter.zip"), lambda _: None)


def digest_of(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def file_id(answer: httpx.Response) -> str | None:
    """The id of a file that was uploaded, or of the first one listed; None: none is."""
    body = answer.json()
    rows = body.get("data", [body])
    return str(rows[0]["id"]) if rows else None


def _path(name: str, *more: str) -> str:
    """A job's path. A name that is a step of paths would be walked, not asked for."""
    return "/".join(["/v1/jobs", quoted(name), *more])


def quoted(name: str) -> str:
    """The name of a job or a sweep as a step of a path."""
    if name in ("", ".", ".."):
        raise ValueError(f"a job must be named by its id or name, got {name!r}")
    return quote(name, safe="")


def _object(answer: httpx.Response) -> dict[str, Any]:
    return dict(answer.json())


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


def _acted(answer: httpx.Response) -> Acted[Job]:
    body = answer.json()
    return Acted([Job.read(row) for row in body["jobs"]], body["refused"])


def _job(answer: httpx.Response) -> Job:
    return Job.read(answer.json())
