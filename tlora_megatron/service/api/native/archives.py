"""`/v1/jobs/{job}/adapter.zip` and `/checkpoints`: what a job has learnt, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as InPath
from fastapi.responses import FileResponse

from tlora_megatron.service.api.access.gate import Reader
from tlora_megatron.service.api.errors import refused
from tlora_megatron.service.api.native.rows import visible_job
from tlora_megatron.service.api.native.wire import CheckpointsAnswer, answers
from tlora_megatron.service.api.native.zipping import archive_of, steps_of
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.store import Job

_ZIP: dict[str, Any] = {
    "response_class": FileResponse,
    "responses": {**answers(404, 409), 200: {"content": {"application/zip": {}}}},
}


def router(service: Service) -> APIRouter:
    """The routes of a job's files."""
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
        return {"checkpoints": await service.read(steps_of, _saved(service, found))}

    @routes.get("/checkpoints/{step}.zip", **_ZIP)
    async def checkpoint(
        job: str,
        step: Annotated[int, InPath(description="as `/checkpoints` lists it", ge=0, le=10**12)],
        caller: Reader,
    ) -> FileResponse:
        """One checkpoint: factors in float32, moments of the optimizer, and the job's state."""
        found = await service.read(visible_job, service, job, caller)
        folder = _saved(service, found) / f"step_{step:08d}"
        return await _send(service, found, folder, f"step-{step}")

    return routes


def _saved(service: Service, job: Job) -> Path:
    return service.home.job(job.id) / "checkpoints"


async def _send(service: Service, job: Job, folder: Path, what: str) -> FileResponse:
    def make() -> Path:
        def outward(text: str) -> str:
            return service.outward(text, job.tenant)

        try:
            archives = service.home.root / "cache" / "archives"
            return archive_of(folder, archives, f"{job.id}-{what}", outward)
        except FileNotFoundError:
            raise refused(f"{what} of job {job.name!r}", "be there", "none", status=404) from None

    path = await service.read(make)
    return FileResponse(path, media_type="application/zip", filename=f"{job.name}-{what}.zip")
