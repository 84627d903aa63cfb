"""Lists models and their checkpoints, and lets clients fetch these: a file each, or an archive.

The SDK downloads from addresses that need no token: they are signed here, and live for an hour.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse

from tlora_megatron.files import modified_s, write_atomic
from tlora_megatron.service.api.gate import Reader
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.checkpoints import Saved
from tlora_megatron.service.api.tinker.context import Reading, Submitting, TenantContext
from tlora_megatron.service.api.tinker.names import Kind, NotSigned, TinkerRoute, UnknownId
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import JobState, Model

_TYPES: dict[Kind, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_MOST = 1000
_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"


async def _path(run: str, kind: str, name: str) -> str:
    return f"tinker://{run}/{kind}/{name}"


CheckpointPath = Annotated[str, Depends(_path)]
"""The `tinker://` path of `_CHECKPOINT`."""


def router(service: Service) -> APIRouter:
    routes = APIRouter(route_class=TinkerRoute)

    @routes.get("/training_runs")
    async def runs(context: Reading, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = await service.read(context.sessions.models, tenant=context.tenant)
        page = _page(found, limit, offset)
        shown = [await service.read(_run, context, model) for model in page]
        return {"training_runs": shown, "cursor": _cursor(found, limit, offset)}

    @routes.get("/training_runs/{run}")
    async def run(run: str, context: Reading) -> dict[str, Any]:
        model = await service.read(context.model, run)
        return await service.read(_run, context, model)

    @routes.get("/training_runs/{run}/checkpoints")
    async def of_run(run: str, context: Reading) -> dict[str, Any]:
        model = await service.read(context.model, run)
        found = await service.read(context.checkpoints.of, model)
        return {"checkpoints": [await service.read(_checkpoint, saved) for saved in found]}

    @routes.get("/checkpoints")
    async def of_all(context: Reading, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found: list[Saved] = []
        for model in await service.read(context.sessions.models, tenant=context.tenant):
            found += await service.read(context.checkpoints.of, model)
        found.sort(key=lambda saved: saved.note.created_at, reverse=True)
        shown = [await service.read(_checkpoint, saved) for saved in _page(found, limit, offset)]
        return {"checkpoints": shown, "cursor": _cursor(found, limit, offset)}

    @routes.delete(_CHECKPOINT)
    async def delete(path: CheckpointPath, context: Submitting) -> None:
        saved = await service.read(context.checkpoints.find, path)
        await service.read(context.checkpoints.remove, saved)

    @routes.put(_CHECKPOINT + "/ttl")
    async def ttl(path: CheckpointPath, body: bodies.Ttl, context: Submitting) -> None:
        await service.read(context.checkpoints.set_ttl, path, body.ttl_seconds)

    return routes


def _page(found: list[Any], limit: int, offset: int) -> list[Any]:
    return found[max(0, offset) :][: min(max(0, limit), _MOST)]


def _cursor(found: list[Any], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(found)}


def _run(context: TenantContext, model: Model) -> dict[str, Any]:
    checkpoints = context.checkpoints.of(model)
    requests = context.service.home.job(model.job) / "requests"
    return {
        "training_run_id": model.id,
        "base_model": model.base,
        "model_owner": context.tenant,
        "is_lora": True,
        "corrupted": context.service.store.jobs.get(model.job).state is JobState.FAILED,
        "lora_rank": model.rank,
        "last_request_time": _time(modified_s(requests, model.created_at)),
        "last_checkpoint": _last(checkpoints, "weights"),
        "last_sampler_checkpoint": _last(checkpoints, "sampler_weights"),
        "user_metadata": model.user_metadata,
    }


def _last(checkpoints: list[Saved], kind: Kind) -> dict[str, Any] | None:
    found = [saved for saved in checkpoints if saved.path.kind == kind]
    return _checkpoint(found[-1]) if found else None


def _checkpoint(saved: Saved) -> dict[str, Any]:
    expires_at = saved.note.expires_at
    return {
        "checkpoint_id": saved.path.checkpoint_id,
        "checkpoint_type": _TYPES[saved.path.kind],
        "time": _time(saved.note.created_at),
        "tinker_path": str(saved.path),
        "size_bytes": saved.size_bytes(),
        "public": False,
        "user_metadata": saved.note.user_metadata,
        "expires_at": None if expires_at is None else _time(expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


LIVES_S = 3600.0
"""Seconds for which an address can be fetched."""
_KEY_NAME = "signing_key"
_KEY_BYTES = 32
_BLOCK = 1 << 20


def downloads_router(service: Service) -> APIRouter:
    routes, signer = APIRouter(route_class=TinkerRoute), Signer(service.home)

    def address(request: Request, grant: Grant) -> str:
        name = grant.file or "checkpoint.tar"
        return f"{request.base_url}api/v1/downloads/{signer.sign(grant)}/{name}"

    @routes.get(_CHECKPOINT + "/archive")
    async def archive(
        path: CheckpointPath, caller: Reader, context: Reading, request: Request
    ) -> dict[str, Any]:
        await service.read(context.checkpoints.find, path)
        grant = signer.grant(caller.tenant, path, token=caller.token)
        return {"url": address(request, grant), "expires": _time(grant.expires_at)}

    @routes.get(_CHECKPOINT + "/external_weights_urls")
    async def urls(
        path: CheckpointPath, caller: Reader, context: Reading, request: Request
    ) -> dict[str, Any]:
        saved = await service.read(context.checkpoints.find, path)
        grants = [
            signer.grant(caller.tenant, path, file, caller.token)
            for file in await service.read(_files, saved)
        ]
        found = {str(grant.file): address(request, grant) for grant in grants}
        return {"urls": found, "expires": _time(grants[0].expires_at)}

    @routes.get("/downloads/{word}/{name}")
    async def download(word: str, name: str) -> Response:
        grant = await service.read(signer.read, word)
        await service.read(_check_token, service, grant)
        context = TenantContext(service, grant.tenant)
        saved = await service.read(context.checkpoints.find, grant.path)
        if grant.file is None:
            files = await service.read(_files, saved)
            return StreamingResponse(_tar(context, saved, files), media_type="application/x-tar")
        size, pieces = await service.read(_open, context, saved, grant.file)
        headers = {"Content-Length": str(size)}
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    return routes


def _check_token(service: Service, grant: Grant) -> None:
    """Refuses an address whose token was revoked."""
    tokens = service.store.tokens.all(grant.tenant)
    if all(token.id != grant.token or token.revoked_at is not None for token in tokens):
        raise NotSigned("an address must be of a token that was not revoked: ask for a new one")


def _files(saved: Saved) -> list[str]:
    """Names of a checkpoint's files."""
    entries = os.scandir(saved.folder)
    return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def _open(context: TenantContext, saved: Saved, name: str) -> tuple[int, Any]:
    """The size of a file and its pieces; JSON without paths of this host."""
    if name not in _files(saved):
        raise UnknownId(f"a file must be one of the checkpoint's, got {name!r:.200}")
    file = saved.folder / name
    if name.endswith(".json"):
        content = context.service.outward(file.read_text(), context.tenant).encode()
        return len(content), iter([content])
    opened = file.open("rb")
    return os.fstat(opened.fileno()).st_size, _pieces(opened)


def _pieces(opened: Any) -> Any:
    with opened:
        while block := opened.read(_BLOCK):
            yield block


def _tar(context: TenantContext, saved: Saved, names: list[str]) -> Any:
    """An archive of a checkpoint, a block at a time; an empty file says that it is whole."""
    for name in names:
        size, pieces = _open(context, saved, name)
        yield _header(name, size)
        yield from pieces
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield _header("checkpoint_complete", 0) + bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry.tobuf(tarfile.PAX_FORMAT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """The right to fetch something by an address, without a token."""

    tenant: str
    path: str
    """A `tinker://` path."""
    file: str | None
    """One file of the checkpoint; None = an archive of all."""
    expires_at: float
    token: str = ""
    """Id of the token that asked for it: when that is revoked, the address ends, too."""


class Signer:
    """Signs grants with a key that the service's folder keeps, by a clock of Unix seconds."""

    def __init__(self, home: Home, clock: Callable[[], float] = time.time) -> None:
        self._file = home.root / _KEY_NAME
        self._clock = clock
        self._key()  # made before two requests could make one each

    def grant(self, tenant: str, path: str, file: str | None = None, token: str = "") -> Grant:
        """A grant that lives for an hour."""
        expires_at = self._clock() + LIVES_S
        return Grant(tenant=tenant, path=path, file=file, expires_at=expires_at, token=token)

    def sign(self, grant: Grant) -> str:
        """The grant as a word of an address."""
        body = _encode(json.dumps(asdict(grant)).encode())
        return f"{body}.{self._mac(body)}"

    def read(self, text: str) -> Grant:
        """The grant of a word; raises `NotSigned` if it was not signed here or its time is over."""
        body, _, mac = text.partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise NotSigned("an address must hold a token that this service gave")
        grant = Grant(**json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        if grant.expires_at < self._clock():
            raise NotSigned("an address must be fetched within an hour: ask for a new one")
        return grant

    def _mac(self, body: str) -> str:
        return _encode(hmac.digest(self._key(), body.encode(), hashlib.sha256))

    def _key(self) -> bytes:
        try:
            key = self._file.read_bytes()
        except FileNotFoundError:
            key = secrets.token_bytes(_KEY_BYTES)
            write_atomic(self._file, key)
        return key


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
