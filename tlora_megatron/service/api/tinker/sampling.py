"""Samples from bases and from what models have learnt, drawn beside the requests that ask for them.

A request to a sampler and its answer are files below `tenants/TENANT/tinker/SESSION`:

    samples/N/SEQ.json    what was asked, with its seed and version: drawn again, it gives the same
    samples/N/SEQ.pb      the answer in protobuf
    samples/N/SEQ.error   why there is none, in JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from tlora_megatron.files import write_atomic
from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker import bodies
from tlora_megatron.service.api.tinker.checkpoints import INFLIGHT, Saved
from tlora_megatron.service.api.tinker.context import (
    Content,
    Reading,
    Submitting,
    TenantContext,
    Waiting,
)
from tlora_megatron.service.api.tinker.names import (
    BY,
    Gone,
    Refused,
    RequestId,
    SamplerId,
    TinkerPath,
    TinkerRoute,
    UnknownId,
)
from tlora_megatron.service.api.tinker.protobuf import encode_sample
from tlora_megatron.service.home import held, make_folder
from tlora_megatron.service.sampling import sampler as sampling
from tlora_megatron.service.store import Sampler
from tlora_megatron.training.saving.writer import AdapterVersion

logger = logging.getLogger(__name__)

_ALONE_S = 120.0
"""Clients look after their requests all the time, for 20 s each: one that does not has gone. If it
comes again, the same is drawn anew."""
_BUSY_S = 1.0
_PAUSED: Any = ("paused_capacity", "the sampler is too busy, or away; it is asked again")
_LONGER_S = 23 * 3600.0
"""Beyond the hour for which other samples are kept (`sessions.SAMPLES_S`)."""


def router(service: Service, tasks: SamplingTasks) -> APIRouter:
    routes = APIRouter(route_class=TinkerRoute)

    @routes.post("/create_sampling_session")
    async def create(body: bodies.CreateSampler, context: Submitting) -> dict[str, Any]:
        sampler = await service.read(_create, context, body)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    @routes.post("/join_sampling_session")
    async def join(sampling_session_id: bodies.Word, context: Submitting) -> dict[str, Any]:
        sampler = await service.read(context.sampler, sampling_session_id)
        count = await service.change(lambda: context.sessions.join_sampler(sampler.id))
        return {"type": "join_sampling_session", "client_counter": count}

    @routes.get("/samplers/{sampler_id}")
    async def get(sampler_id: str, context: Reading) -> dict[str, Any]:
        sampler = await service.read(context.sampler, sampler_id)
        return {
            "sampler_id": sampler.id,
            "base_model": sampler.base,
            "model_path": sampler.model_path,
            "version": sampler.version,
        }

    @routes.post("/asample")
    async def sample(body: bodies.Sample, context: Submitting) -> dict[str, Any]:
        bodies.check_sample(body)
        try:
            _source(context).check_room()
        except sampling.SamplerBusy as error:
            raise ApiError(429, str(error), headers={"Retry-After": "1"}) from error
        request, sampler, version = await service.read(_take, context, body)
        tasks.begin(context, request, sampler)
        by = "" if version is None else f"{BY}{version}"
        ids = [f"{request}:{index}{by}" for index in range(body.num_samples)]
        return {"request_id": str(request), "sample_sequence_ids": ids}

    @routes.post("/cancel_future")
    async def cancel(request_id: bodies.Word, context: Submitting) -> None:
        request = RequestId.parse(request_id)
        if isinstance(request.of, SamplerId):
            await service.read(context.sampler, str(request.of))
            tasks.cancel(context, request)

    return routes


def _create(context: TenantContext, body: bodies.CreateSampler) -> Sampler:
    _source(context)
    context.open_session(body.session_id)
    if body.base_model is None and body.model_path is None:
        raise Refused("base_model or model_path must be given, got neither")
    base = body.base_model
    if body.model_path is not None:
        base = context.model(_sampleable(context, body.model_path).note.model).base
    context.base(str(base))
    id = SamplerId(body.session_id, body.sampling_session_seq_id)
    known = context.sessions.sampler(str(id), tenant=context.tenant)
    if known is not None and (known.base, known.model_path) == (base, body.model_path):
        return known  # a retry must not move it to weights that were published since
    return _pinned(context, context.new_sampler(id, str(base), body.model_path))


def _pinned(context: TenantContext, sampler: Sampler) -> Sampler:
    """Remembers a sampler of the weights to which its path leads now."""
    version = _version(context, sampler)
    while True:
        pinned = replace(sampler, version=None if version is None else str(version))
        context.sessions.put_sampler(pinned)
        before, version = version, _version(context, sampler)
        if version == before:  # its name led there when it was noted, so it was not deleted
            return pinned


def _version(context: TenantContext, sampler: Sampler) -> AdapterVersion | None:
    path = sampler.model_path
    return None if path is None else _sampleable(context, path).version


def _sampleable(context: TenantContext, path: str) -> Saved:
    saved = context.checkpoints.find(path)
    if saved.path.kind != "sampler_weights":
        raise Refused(f"model_path must be one of save_weights_for_sampler, got {path!r}")
    return saved


def _take(context: TenantContext, body: bodies.Sample) -> tuple[RequestId, Sampler, str | None]:
    """Notes what is asked of whom, and of which version; the same number again changes nothing."""
    _source(context)
    if body.sampling_session_id is None or body.seq_id is None:
        raise Refused("sampling_session_id and seq_id must be given: create_sampling_session first")
    sampler = context.sampler(body.sampling_session_id)
    context.open_session(sampler.session)
    context.sessions.hear(sampler.id)
    request = RequestId(SamplerId(sampler.session, sampler.number), body.seq_id, "sample")
    version, files = _moved(context, sampler).version, files_of(context, request)
    asked: Any = {"body": body.model_dump(mode="json"), "seed": secrets.randbits(62)}
    asked["version"] = version
    if not files.ask(asked):
        asked = files.asked() or asked
    return request, sampler, asked.get("version", version)


def _moved(context: TenantContext, sampler: Sampler) -> Sampler:
    """The sampler, which is of the newest version by now if it is an inflight one."""
    path = sampler.model_path
    if path is None or sampler.version is None or not path.endswith(INFLIGHT):
        return sampler
    model = context.model(str(TinkerPath.parse(path).model))
    newest = context.checkpoints.newest_inflight(model)
    if newest is None or newest <= AdapterVersion.parse(sampler.version):
        return sampler
    context.sessions.move_sampler(sampler.id, str(newest))
    return replace(sampler, version=str(newest))


def _source(context: TenantContext) -> sampling.Sampler:
    if context.service.sampler is None:
        raise Refused("this service must generate to be sampled from: `tlora serve --sampler own`")
    return context.service.sampler


class SamplingTasks:
    """The samples that this process draws. If it dies, the next one draws the same ones again."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        """End what no client has asked after for long."""

    async def wait_for(
        self, context: TenantContext, request: RequestId, seconds: float
    ) -> Content | Waiting:
        """The answer to a request; if there is none after some seconds, that it is being drawn.

        Raises `UnknownId` if its sampler is none of the tenant's, `Gone` if it is not kept any
        more.
        """
        read, files = context.service.read, files_of(context, request)
        if _key(context, request) not in self._tasks:  # else it is the tenant's own, and is there
            await read(context.sampler, str(request.of))
            found = await read(files.result)
            if found is not None:
                return found
            if await read(files.asked) is None:
                raise Gone(f"the answer to {request} is not kept any more: ask again")
        task = self.begin(context, request)
        await asyncio.wait([task], timeout=seconds)
        found = await read(files.result)
        if found is not None:
            return found
        return Waiting(*_PAUSED) if task.done() else Waiting()

    def cancel(self, context: TenantContext, request: RequestId) -> None:
        """Draws no more for a request that its client has given up."""
        task = self._tasks.get(_key(context, request))
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(
        self, context: TenantContext, request: RequestId, sampler: Sampler | None = None
    ) -> asyncio.Task[None]:
        """Draws what is asked, once at a time; the sampler is looked up if it is not known."""
        key = _key(context, request)
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(_draw(context, request, sampler))
            task.add_done_callback(lambda _: self._end(key))
        else:
            self._alarms[key].cancel()
        self._alarms[key] = asyncio.get_running_loop().call_later(_ALONE_S, task.cancel)
        return task

    def _end(self, key: str) -> None:
        self._alarms.pop(key).cancel()
        del self._tasks[key]


def files_of(context: TenantContext, request: RequestId) -> SampleFiles:
    """The files of a request; raises `UnknownId` if it is of no sampler."""
    if not isinstance(request.of, SamplerId):
        raise UnknownId(f"request_id must be a sampler's, got {str(request)!r}")
    folder = context.samples(request.of.session) / str(request.of.number)
    return SampleFiles(folder, request.seq_id)


async def _draw(context: TenantContext, request: RequestId, sampler: Sampler | None) -> None:
    """Draws one request's samples, and writes the answer or why there is none."""
    read, files = context.service.read, files_of(context, request)
    try:
        order = await read(_order, context, request, files, sampler)
        if order is None:
            return
        body, sampler, folder, seed = order
        with held(folder):
            if folder is not None and not folder.is_dir():
                raise _gone(sampler)
            prompt = bodies.as_prompt(body, None if folder is None else str(folder), seed)
            answers = await _source(context).generate(sampler.base, [prompt])
        content = encode_sample(answers[0], body)
    except (sampling.SamplingRefused, UnknownId) as error:
        sentence = context.service.outward(str(error), context.tenant)
        await read(files.fail, sentence, "user")
    except sampling.SamplerBusy:
        await asyncio.sleep(_BUSY_S)  # the client's next look begins it again
    except sampling.SamplerAway as error:
        logger.error("%s", error)  # as above
    except sampling.SamplerUnavailable as error:
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
        if body.record_stability_info:
            await read(files.keep_longer)


def _order(
    context: TenantContext, request: RequestId, files: SampleFiles, known: Sampler | None
) -> tuple[bodies.Sample, Sampler, Path | None, int] | None:
    """What is to be drawn: the request, its sampler, the weights, the seed; None: nothing is."""
    asked = files.asked()
    if asked is None or files.result() is not None:
        return None
    sampler = known or context.sampler(str(request.of))
    sampler = replace(sampler, version=asked.get("version", sampler.version))
    folder = None
    if sampler.version is not None:
        folder = context.checkpoints.sampled_folder(AdapterVersion.parse(sampler.version))
    elif sampler.model_path is not None:
        saved = context.checkpoints.find(sampler.model_path)
        if saved.version is not None:  # it took the name of weights from before there were any
            raise _gone(sampler)
        folder = saved.folder
    return bodies.Sample.model_validate(asked["body"]), sampler, folder, asked["seed"]


def _gone(sampler: Sampler) -> UnknownId:
    return UnknownId(
        f"{sampler.model_path} must still be there as it was when this sampling client was made "
        f"(version {sampler.version}), got none: make a new client of a checkpoint that is there"
    )


def _key(context: TenantContext, request: RequestId) -> str:
    return f"{context.tenant}/{request}"


class SampleFiles:
    """The files of one request of a sampler."""

    def __init__(self, folder: Path, seq_id: int) -> None:
        self.asked_file = folder / f"{seq_id}.json"
        self._answer_file = folder / f"{seq_id}.pb"
        self._error_file = folder / f"{seq_id}.error"

    def ask(self, body: Mapping[str, Any]) -> bool:
        """Writes what is asked; False if it was asked before."""
        if self.asked_file.exists():
            return False
        make_folder(self.asked_file.parent)
        write_atomic(self.asked_file, json.dumps(dict(body)), durable=False)
        return True

    def asked(self) -> Mapping[str, Any] | None:
        """The request; None if there was none."""
        try:
            found: Mapping[str, Any] = json.loads(self.asked_file.read_bytes())
        except FileNotFoundError:
            return None
        return found

    def answer(self, content: bytes) -> None:
        write_atomic(self._answer_file, content, durable=False)

    def keep_longer(self) -> None:
        """Lets a recorded sample be trained on for a day from now."""
        later_s = time.time() + _LONGER_S
        for file in (self.asked_file, self._answer_file):
            os.utime(file, (later_s, later_s))

    def fail(self, error: str, category: str) -> None:
        text = json.dumps({"error": error, "category": category})
        write_atomic(self._error_file, text, durable=False)

    def result(self) -> bytes | Mapping[str, Any] | None:
        """The answer, or why there is none; None = not yet."""
        try:
            return self._answer_file.read_bytes()
        except FileNotFoundError:
            pass
        try:
            found: Mapping[str, Any] = json.loads(self._error_file.read_bytes())
        except FileNotFoundError:
            return None
        return found


def sweep_samples(folder: Path, before: float) -> None:
    """Deletes what the samplers of a folder were asked before a time, in Unix seconds."""
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):  # one that is being written gets another name
            if file.stat().st_mtime < before:
                file.unlink()
