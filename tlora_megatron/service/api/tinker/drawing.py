"""Draws samples beside the requests that ask for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path
from typing import Any

from tlora_megatron.service.api.tinker.desk import Desk
from tlora_megatron.service.api.tinker.refusals import Gone, UnknownId
from tlora_megatron.service.api.tinker.state.futures import Content, Waiting
from tlora_megatron.service.api.tinker.state.names import RequestId, SamplerId
from tlora_megatron.service.api.tinker.state.samples import SampleFiles
from tlora_megatron.service.api.tinker.state.sessions import SampledFrom
from tlora_megatron.service.api.tinker.wire.bodies import Sample
from tlora_megatron.service.api.tinker.wire.encoding import encode_sample
from tlora_megatron.service.api.tinker.wire.prompts import as_prompt
from tlora_megatron.training.saving.writer import AdapterVersion

logger = logging.getLogger(__name__)


class Drawing:
    """The samples that this process draws. If it dies, the next one draws the same ones again."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def take(self, desk: Desk, request: RequestId, body: Sample) -> None:
        """Notes what is asked, and begins; the same number again changes nothing."""
        asked = {"body": body.model_dump(mode="json"), "seed": secrets.randbits(62)}
        files = files_of(desk, request)
        await desk.service.read(files.ask, asked)
        self._begin(desk, request)

    async def wait_for(self, desk: Desk, request: RequestId, seconds: float) -> Content | Waiting:
        """The answer to a request; if there is none after some seconds, that it is being drawn.

        Raises:
            UnknownId: if its sampler is none of the tenant's.
            Gone: if the request is not kept any more.
        """
        read, files = desk.service.read, files_of(desk, request)
        await read(desk.sessions.sampler, str(request.of))
        found = await read(files.result)
        if found is not None:
            return found
        if await read(files.asked) is None:
            raise Gone(f"the answer to {request} is not kept any more: ask again")
        task = self._begin(desk, request)
        await asyncio.wait([task], timeout=seconds)
        found = await read(files.result)
        return Waiting() if found is None else found

    def cancel(self, desk: Desk, request: RequestId) -> None:
        """Draws no more for a request that nobody waits for."""
        task = self._tasks.get(_key(desk, request))
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends all drawing."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, desk: Desk, request: RequestId) -> asyncio.Task[None]:
        key = _key(desk, request)
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(_draw(desk, request))
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return task


def files_of(desk: Desk, request: RequestId) -> SampleFiles:
    """The files of a request.

    Raises:
        UnknownId: if it is of no sampler.
    """
    if not isinstance(request.of, SamplerId):
        raise UnknownId(f"request_id must be a sampler's, got {str(request)!r}")
    return SampleFiles(desk.sessions.samples(request.of), request.seq_id)


async def _draw(desk: Desk, request: RequestId) -> None:
    """Draws one request's samples, and writes the answer or why there is none."""
    from tlora_megatron.service.sampling.sampler import SamplerUnavailable, SamplingRefused

    read, files = desk.service.read, files_of(desk, request)
    asked: Any = await read(files.asked)
    if asked is None or await read(files.result) is not None:
        return
    try:
        body = Sample.model_validate(asked["body"])
        sampler = await read(desk.sessions.sampler, str(request.of))
        folder = await read(_folder, desk, sampler)
        with desk.service.in_use.held(folder):
            if folder is not None and not folder.is_dir():
                raise UnknownId(_not_kept(sampler))
            prompt = as_prompt(body, None if folder is None else str(folder), asked["seed"])
            answers = await desk.service.sampler.generate(sampler.base, [prompt])
        content = encode_sample(answers[0], body.prompt_logprobs_last_n)
    except (SamplingRefused, UnknownId) as error:
        told = desk.service.outward(str(error), desk.tenant)
        await read(files.fail, told, "user")
    except SamplerUnavailable as error:
        # It quotes the sampler's log, which may be of other tenants' requests.
        logger.error("%s", error)
        await read(
            files.fail, "the sampler cannot be used now; the service's log says why", "server"
        )
    except Exception:
        logger.exception("sampling failed")
        await read(files.fail, "the service failed to sample; its log says more", "server")
    else:
        await read(files.answer, content)


def _folder(desk: Desk, sampler: SampledFrom) -> Path | None:
    """The weights that a sampler samples from: those that it has had from its start."""
    if sampler.model_path is None:
        return None
    if sampler.version is None:
        return desk.checkpoints.find(sampler.model_path).folder
    return desk.checkpoints.folder(AdapterVersion.parse(sampler.version))


def _not_kept(sampler: SampledFrom) -> str:
    return (
        f"{sampler.model_path} must still be there as it was when this sampling client was made "
        f"(version {sampler.version}), got none: make a new client of a checkpoint that is there"
    )


def _key(desk: Desk, request: RequestId) -> str:
    return f"{desk.tenant}/{request}"
