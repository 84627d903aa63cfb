"""Lets clients fetch what they have saved: a file each, or an archive of all."""

from __future__ import annotations

import os
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from tlora_megatron.service.api.access.gate import Reader
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.errors import TinkerRoute
from tlora_megatron.service.api.tinker.refusals import NotSigned, UnknownId
from tlora_megatron.service.api.tinker.state.checkpoints import Saved
from tlora_megatron.service.api.tinker.state.signing import Grant, Signer

_CHECKPOINT = "/training_runs/{run}/checkpoints/{kind}/{name}"
_BLOCK = 1 << 20


def router(service: Service) -> APIRouter:
    """The routes of downloads."""
    routes, signer = APIRouter(route_class=TinkerRoute), Signer(service.home)

    def address(request: Request, grant: Grant) -> str:
        name = grant.file or "checkpoint.tar"
        return f"{request.base_url}api/v1/downloads/{signer.sign(grant)}/{name}"

    @routes.get(_CHECKPOINT + "/archive")
    async def archive(
        run: str, kind: str, name: str, caller: Reader, request: Request
    ) -> dict[str, Any]:
        desk, path = Desk.of(service, caller.tenant), f"tinker://{run}/{kind}/{name}"
        await service.read(desk.checkpoints.find, path)
        grant = signer.grant(caller.tenant, path, token=caller.token)
        return {"url": address(request, grant), "expires": _time(grant)}

    @routes.get(_CHECKPOINT + "/external_weights_urls")
    async def urls(
        run: str, kind: str, name: str, caller: Reader, request: Request
    ) -> dict[str, Any]:
        desk, path = Desk.of(service, caller.tenant), f"tinker://{run}/{kind}/{name}"
        saved = await service.read(desk.checkpoints.find, path)
        grants = [
            signer.grant(caller.tenant, path, file, caller.token)
            for file in await service.read(_files, saved)
        ]
        told = {str(grant.file): address(request, grant) for grant in grants}
        return {"urls": told, "expires": _time(grants[0])}

    @routes.get("/downloads/{word}/{name}")
    async def download(word: str, name: str) -> Response:
        grant = await service.read(signer.read, word)
        await service.read(_check_token, service, grant)
        desk = Desk.of(service, grant.tenant)
        saved = await service.read(desk.checkpoints.find, grant.path)
        if grant.file is None:
            files = await service.read(_files, saved)
            return StreamingResponse(_tar(desk, saved, files), media_type="application/x-tar")
        size, pieces = await service.read(_open, desk, saved, grant.file)
        headers = {"Content-Length": str(size)}
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    return routes


def _check_token(service: Service, grant: Grant) -> None:
    """Refuses an address whose token was revoked."""
    tokens = service.store.tokens.all(grant.tenant)
    if all(token.id != grant.token or token.revoked_at is not None for token in tokens):
        raise NotSigned("an address must be of a token that was not revoked: ask for a new one")


def _time(grant: Grant) -> str:
    return datetime.fromtimestamp(grant.expires_at, UTC).isoformat()


def _files(saved: Saved) -> list[str]:
    """Names of a checkpoint's files."""
    entries = os.scandir(saved.folder)
    return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def _open(desk: Desk, saved: Saved, name: str) -> tuple[int, Any]:
    """The size of a file and its pieces; JSON is told without paths of this host."""
    if name not in _files(saved):
        raise UnknownId(f"a file must be one of the checkpoint's, got {name!r:.200}")
    file = saved.folder / name
    if name.endswith(".json"):
        content = desk.service.outward(file.read_text(), desk.tenant).encode()
        return len(content), iter([content])
    opened = file.open("rb")
    return os.fstat(opened.fileno()).st_size, _pieces(opened)


def _pieces(opened: Any) -> Any:
    with opened:
        while block := opened.read(_BLOCK):
            yield block


def _tar(desk: Desk, saved: Saved, names: list[str]) -> Any:
    """An archive of a checkpoint, a block at a time; an empty file says that it is whole."""
    for name in names:
        size, pieces = _open(desk, saved, name)
        yield _header(name, size)
        yield from pieces
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield _header("checkpoint_complete", 0) + bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(Path(name).name)
    entry.size, entry.mode = size, 0o600
    return entry.tobuf(tarfile.PAX_FORMAT)
