"""A service over HTTP in a test: in this process, or on a port of the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.helpers.launch import HANG_S
from tlora_megatron.service.api.server import make_app, make_server
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.front import Place, listen
from tlora_megatron.service.home import Home, make_folder
from tlora_megatron.service.settings import declare_bases
from tlora_megatron.service.store import SCOPES, Store, open_store

BASE = "quickstart"
"""Name under which the service offers the quickstart's base."""
_BASE_FOLDER = Path(__file__).resolve().parents[2] / "configs/quickstart/base"


@dataclass(frozen=True, slots=True)
class Api:
    """A service's app, and callers with tokens."""

    service: Service
    app: FastAPI
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Home:
        return self.service.home

    @property
    def store(self) -> Store:
        return self.service.store

    def token(self, tenant: str = "ann", scopes: Sequence[str] = SCOPES[:2]) -> str:
        """A token of a tenant with some scopes; the same one for the same words."""
        key = f"{tenant} {' '.join(scopes)}"
        if key not in self.secrets:
            self.secrets[key] = self.store.tokens.make(tenant, scopes).secret
        return self.secrets[key]

    def client(self, tenant: str | None = "ann", scopes: Sequence[str] = SCOPES[:2]) -> TestClient:
        """A client in this process, with plain calls; `tenant` None: without a token.

        Answers come as a whole: streams that do not end need `listening`. In a `with` block the
        app's lifespan runs.
        """
        headers = {} if tenant is None else bearer(self.token(tenant, scopes))
        return TestClient(self.app, headers=headers, raise_server_exceptions=False)

    def async_client(self, tenant: str = "ann") -> httpx.AsyncClient:
        """A client in this process for tests with an event loop."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://service",
            headers=bearer(self.token(tenant)),
        )


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def put_file(api: Api, tenant: str = "ann") -> None:
    """Lays `rows.jsonl` into a tenant's folder, as its operator may."""
    folder = make_folder(api.home.tenant(tenant))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')


def job(name: str = "a", **fields: Any) -> dict[str, Any]:
    """A job's document, whose data `put_file` lays there."""
    data = {"train": "rows.jsonl"}
    return {"base_model": BASE, "name": name, "data": data, "max_steps": 2, **fields}


def posted(api: Api, **fields: Any) -> str:
    """Submits a job of ann's over HTTP; returns its id."""
    put_file(api)
    answer = api.client().post("/v1/jobs", json=job(**fields))
    return str(answer.json()["jobs"][0]["id"])


@contextmanager
def open_api(root: Path, **settings: Any) -> Iterator[Api]:
    """A service in a folder, offering the quickstart's base by the name `BASE`."""
    home = Home.open(root)
    declare_bases(home, [f"{BASE}={_BASE_FOLDER}"])
    with open_store(home.store) as store:
        service = Service.of(home, store, **settings)
        yield Api(service, make_app(service))


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serves an app on a free port of the loopback interface; yields its address."""
    server = make_server(app)
    socket = listen(Place("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    _wait_until_started(server, thread)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(HANG_S)
        socket.close()


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    while not server.started:
        thread.join(0.005)
        assert thread.is_alive(), "the server must start, got one that has ended"
