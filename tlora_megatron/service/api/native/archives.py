"""`/v1/jobs/{job}/adapter.zip` and `/checkpoints`: what a job has learnt, as files in archives."""

from __future__ import annotations

import os
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter
from fastapi import Path as InPath
from fastapi.responses import FileResponse

from tlora_megatron.files import OPEN_FILE, OPEN_FOLDER, modified_s, replacing
from tlora_megatron.service.api.gate import Reader, refused
from tlora_megatron.service.api.native.jobs import CheckpointsAnswer, answers, visible_job
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.home import ARCHIVES, make_folder
from tlora_megatron.service.store import Job

_STEP = re.compile(r"step_(\d{8,})")
_ENDINGS = (".json", ".safetensors", ".md", ".txt")
_SAVED = "checkpoints"
_KEPT = 16
_BLOCK = 1 << 20


def archive_of(folder: Path, archives: Path, name: str, outward: Callable[[str], str]) -> Path:
    """The zip file of a folder's plain files, made where none of this state is there.

    All are opened first, so that a checkpoint that is replaced meanwhile is sent as it was.

    Args:
        name: what the folder is, not how it was at some time.
        outward: takes the host's paths out of the text of JSON files.

    Raises:
        FileNotFoundError: if there is no such folder, or nothing in it.
    """
    with ExitStack() as opened:
        handle = os.open(folder, OPEN_FOLDER)
        opened.callback(os.close, handle)
        files: dict[str, BinaryIO] = {}
        for inner in sorted(os.listdir(handle)):
            kind = os.stat(inner, dir_fd=handle, follow_symlinks=False).st_mode
            if inner.endswith(_ENDINGS) and not inner.startswith(".") and stat.S_ISREG(kind):
                file = os.fdopen(os.open(inner, OPEN_FILE, dir_fd=handle), "rb")
                files[inner] = opened.enter_context(file)
        if not files:
            raise FileNotFoundError(str(folder))
        stamp = max(os.fstat(file.fileno()).st_mtime_ns for file in files.values())
        path = make_folder(archives) / f"{name}-{stamp}.zip"
        if not path.exists():
            _write(path, files, outward)
            # Not asked for lately; whoever reads one reads it to its end.
            for old in sorted(archives.glob("*.zip"), key=modified_s)[:-_KEPT]:
                old.unlink(missing_ok=True)
    os.utime(path)
    return path


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints in a folder, the newest first."""
    found = []
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            match = _STEP.fullmatch(entry.name)
            if match is None or not entry.is_dir(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):  # a newer one has taken its place
                written = (Path(entry.path) / "state.json").stat()
                size = sum(inner.stat().st_size for inner in os.scandir(entry.path))
                row = {"step": int(match[1]), "bytes": size, "written_at": written.st_mtime}
                found.append(row)
    return sorted(found, key=lambda row: -row["step"])


def _write(path: Path, files: dict[str, BinaryIO], outward: Callable[[str], str]) -> None:
    """Writes the archive aside and gives it its name when it is whole."""
    with (
        replacing(path, durable=False) as whole,
        zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name, file in files.items():
            entry = zipfile.ZipInfo(name)
            if name.endswith(".json"):
                archive.writestr(entry, outward(file.read().decode()))
                continue
            with archive.open(entry, "w", force_zip64=True) as target:
                shutil.copyfileobj(file, target, _BLOCK)


_ZIP: dict[str, Any] = {
    "response_class": FileResponse,
    "responses": {**answers(404, 409), 200: {"content": {"application/zip": {}}}},
}


def router(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/jobs/{job}", tags=["files of jobs"])

    @routes.get("/adapter.zip", **_ZIP)
    async def adapter(job: str, caller: Reader) -> FileResponse:
        """The adapter of a finished job, as PEFT and vLLM load it. Ranges can be asked for."""
        found = await service.read(visible_job, service, job, caller)
        if found.state != "finished":
            got = f"{found.state} at step {found.step}"
            raise refused(f"job {found.name!r}", "be finished to have an adapter", got, status=409)
        return await _send(service, found, service.home.job(found.id) / "adapter", "adapter")

    @routes.get("/checkpoints", response_model=CheckpointsAnswer, responses=answers(404))
    async def checkpoints(job: str, caller: Reader) -> dict[str, Any]:
        """The checkpoints that are on the disk: the last two."""
        found = await service.read(visible_job, service, job, caller)
        return {"checkpoints": await service.read(steps_of, service.home.job(found.id) / _SAVED)}

    @routes.get("/checkpoints/{step}.zip", **_ZIP)
    async def checkpoint(
        job: str,
        step: Annotated[int, InPath(description="as `/checkpoints` lists it", ge=0, le=10**12)],
        caller: Reader,
    ) -> FileResponse:
        """One checkpoint: factors in float32, moments of the optimizer, and the job's state."""
        found = await service.read(visible_job, service, job, caller)
        folder = service.home.job(found.id) / _SAVED / f"step_{step:08d}"
        return await _send(service, found, folder, f"step-{step}")

    return routes


async def _send(service: Service, job: Job, folder: Path, what: str) -> FileResponse:
    def make() -> Path:
        def outward(text: str) -> str:
            return service.outward(text, job.tenant)

        try:
            return archive_of(folder, service.home.root / ARCHIVES, f"{job.id}-{what}", outward)
        except FileNotFoundError:
            raise refused(f"{what} of job {job.name!r}", "be there", "none", status=404) from None

    path = await service.read(make)
    return FileResponse(path, media_type="application/zip", filename=f"{job.name}-{what}.zip")
