"""What a tenant's Tinker clients have here: sessions, models, checkpoints, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.service.api.gate import Reader, Submitter
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.checkpoints import (
    EPHEMERAL,
    INFLIGHT,
    Checkpoints,
    path_of,
)
from tlora_megatron.service.api.tinker.names import (
    Gone,
    ModelId,
    Refused,
    RequestId,
    SamplerId,
    UnknownId,
    check_session,
)
from tlora_megatron.service.api.tinker.protobuf import MEDIA_TYPE, encode_pass
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import Job, JobState, Model, NotFound, Sampler, Session
from tlora_megatron.service.store.tenants import Sessions
from tlora_megatron.training.driven_requests import Answer

Content = bytes | Mapping[str, Any]
"""A result: protobuf, or JSON."""
SAVE_FOR_SESSION = "save_weights_for_session"
"""A save for one sampler alone, whose number ends the checkpoint's name."""
_QUEUED: Mapping[JobState, str] = {
    JobState.VALIDATING: "the service looks at the model's settings",
    JobState.QUEUED: "the model waits for a place on the service's GPUs",
    JobState.STARTING: "the model's place is being made ready",
    JobState.PAUSED: "the model is paused: `tlora resume` lets it go on",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no answer yet."""

    queue_state: Literal["active", "paused_capacity"] = "active"
    reason: str | None = None

    def content(self, request_id: str) -> dict[str, Any]:
        body = {"type": "try_again", "request_id": request_id, "queue_state": self.queue_state}
        return body if self.reason is None else {**body, "queue_state_reason": self.reason}


def _end_of(job: Job) -> Mapping[str, Any]:
    """The error of a request that its job will never answer."""
    if job.state is JobState.FAILED:
        return {"error": job.error or "the model's job has failed", "category": "server"}
    words = "was cancelled" if job.state is JobState.CANCELLED else "has left"
    return {"error": f"the model {words}: load a checkpoint of it", "category": "user"}


def _content(request: RequestId, model: Model, answer: Answer) -> Content:
    if answer.error is not None:
        return {"error": answer.error, "category": answer.category or "server"}
    if request.op in ("forward_backward", "forward"):
        if answer.logprobs is None or answer.lengths is None:
            return {"error": "the answer must have log-probabilities", "category": "server"}
        return encode_pass(answer)
    body: dict[str, Any] = {"type": request.op}
    if request.op == "optim_step":
        return {**body, "metrics": dict(answer.metrics)}
    if request.op in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        return {**body, "path": _path(model, answer)}
    if request.op == SAVE_FOR_SESSION:
        name = _path(model, answer).rpartition("/")[2]
        number = name.removeprefix(EPHEMERAL).removesuffix(INFLIGHT)
        if not number.isdecimal():
            raise UnknownId("request_id must be of a save for one sampler, got another save's")
        sampler = SamplerId(model.session, int(number))
        return {"type": "save_weights_for_sampler", "sampling_session_id": str(sampler)}
    if request.op == "load_weights":
        return {**body, "model_id": model.id, "path": model.loaded_from}
    return {**body, "model_id": model.id}


def _path(model: Model, answer: Answer) -> str:
    if "path" not in answer.values:
        raise UnknownId("request_id must be of a request that saved something, got another one's")
    return str(path_of(ModelId.of(model), str(answer.values["path"])))


def respond(found: Content | Waiting, request_id: str) -> Response:
    """The response with a result, or with the news that there is none yet."""
    if isinstance(found, Waiting):
        return JSONResponse(found.content(request_id))
    if isinstance(found, bytes):
        return Response(found, media_type=MEDIA_TYPE)
    return JSONResponse(dict(found))


@dataclass(frozen=True, slots=True)
class TenantContext:
    """A tenant's part of the service, for one request. It holds no state of its own."""

    service: Service
    tenant: str

    @property
    def sessions(self) -> Sessions:
        """Rows of sessions and all that is theirs, of all tenants."""
        return self.service.store.sessions

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.service.home, self.service.store, self.tenant)

    def is_answered(self, request: RequestId, model: Model) -> bool:
        """True if an answer is on the disk; cheap, for those that wait for it."""
        if request.seq_id == 0 and model.loaded_from is None:
            return False
        return self.request_log(model).has_answer(model.log_number(request.seq_id))

    def model_of(self, request: RequestId) -> Model:
        """The model of a request; raises `UnknownId`, or `Gone` if it was forgotten."""
        found = self.sessions.model(str(request.of), tenant=self.tenant)
        if found is not None:
            return found
        if isinstance(request.of, ModelId):  # of a forgotten one its job is all that is known
            with suppress(NotFound):
                self.service.store.jobs.find(request.of.job_name, tenant=self.tenant)
                raise Gone(f"the answer to {request} is not kept any more")
        raise UnknownId(f"model_id must be one of the tenant's, got {str(request.of)!r:.200}")

    def look(self, request: RequestId, model: Model) -> Content | Waiting:
        """The answer to a request, or why there is none yet; raises `UnknownId` or `Gone`."""
        if request.seq_id == 0 and model.loaded_from is None:
            job = self.service.store.jobs.get(model.job)
            if job.started_at is None:
                return self._waiting(job)
            return {"type": "create_model", "model_id": model.id}
        number, log = model.log_number(request.seq_id), self.request_log(model)
        answer = log.read_answer(number)
        if answer is not None:
            return _content(request, model, answer)
        state = log.state(number)
        if state == "unknown":
            raise UnknownId(f"request_id must be of a request that was made, got {str(request)!r}")
        if state == "gone":
            raise Gone(f"the answer to {request} is not kept any more: ask again")
        return self._waiting(self.service.store.jobs.get(model.job))

    def _waiting(self, job: Job) -> Content | Waiting:
        if job.state.is_over:
            return _end_of(job)
        reason = _QUEUED.get(job.state)
        return Waiting() if reason is None else Waiting("paused_capacity", reason)

    def session(self, session_id: str) -> Session:
        """The session of an id; raises `UnknownId` if the tenant has none."""
        found = self.sessions.get(check_session(session_id), tenant=self.tenant)
        if found is None:
            raise UnknownId(f"session_id must be one of the tenant's, got {session_id!r:.200}")
        return found

    def open_session(self, session_id: str) -> Session:
        """A session that goes on; raises `UnknownId` if there is none, `Gone` if it has ended."""
        session = self.session(session_id)
        if session.ended is not None:
            raise Gone(
                f"session {session_id} must go on, got one that has ended: {session.ended}. Begin "
                "a new one; checkpoints of its models can be loaded there"
            )
        return session

    def model(self, model_id: str) -> Model:
        """The model of an id; raises `UnknownId` if the tenant has none."""
        found = self.sessions.model(str(ModelId.parse(model_id)), tenant=self.tenant)
        if found is None:
            raise UnknownId(f"model_id must be one of the tenant's, got {model_id!r:.200}")
        return found

    def open_model(self, model_id: str) -> Model:
        """A model that takes requests; raises `UnknownId`, or `Gone` if it has left."""
        with self.service.store.database.read():
            self.open_session(ModelId.parse(model_id).session)
            model = self.model(model_id)
        if model.last_request is not None:
            raise Gone(f"model {model_id} must be there, got one that was unloaded")
        return model

    def sampler(self, sampler_id: str) -> Sampler:
        """The sampler of an id; raises `UnknownId` if the tenant has none."""
        found = self.sessions.sampler(str(SamplerId.parse(sampler_id)), tenant=self.tenant)
        if found is None:
            raise UnknownId(f"sampling_session_id must be one of the tenant's, got {sampler_id!r}")
        return found

    def new_model(self, id: ModelId, **fields: Any) -> Model:
        """A model of the tenant that has no job yet and is not written."""
        return Model(
            id=str(id),
            tenant=self.tenant,
            session=id.session,
            number=id.number,
            job="",
            created_at=self.service.store.database.clock(),
            **fields,
        )

    def new_sampler(
        self, id: SamplerId, base: str, model_path: str | None = None, version: str | None = None
    ) -> Sampler:
        """A sampler of the tenant that is not written yet."""
        return Sampler(
            id=str(id),
            tenant=self.tenant,
            session=id.session,
            number=id.number,
            base=base,
            model_path=model_path,
            version=version,
            heard_at=self.service.store.database.clock(),
        )

    def samples(self, session_id: str) -> Path:
        """Folder of what was asked of a session's samplers, and answered; not made here."""
        folder = self.service.home.tenant(self.tenant)
        return folder / "tinker" / check_session(session_id) / "samples"

    def request_log(self, model: Model) -> RequestLog:
        return RequestLog(self.service.home.job(model.job))

    def held_bytes(self) -> int:
        """Bytes of requests and answers of all models."""
        models = self.sessions.models(tenant=self.tenant)
        return sum(self.request_log(model).held_bytes() for model in models)

    def base(self, name: str) -> BaseModelSpec:
        """The base of a name; raises `Refused` if the service offers none of this name."""
        bases = self.service.bases()
        if name not in bases:
            offered = ", ".join(bases) or "none: `tlora serve --base NAME=PATH` offers one"
            raise Refused(
                f"base_model must be one that this service offers ({offered}), got {name!r}"
            )
        return bases[name]


async def _reading(request: Request, caller: Reader) -> TenantContext:
    return TenantContext(request.app.state.service, caller.tenant)


async def _submitting(request: Request, caller: Submitter) -> TenantContext:
    return await _reading(request, caller)


Reading = Annotated[TenantContext, Depends(_reading)]
"""The tenant of a caller whose token may read."""
Submitting = Annotated[TenantContext, Depends(_submitting)]
"""The tenant of a caller whose token may submit."""


def positions_of(base: BaseModelSpec) -> int | None:
    """Tokens of the longest sequence that a base is made for; None if it does not say."""
    found = _config_of(base)
    value = found.get("text_config", found).get("max_position_embeddings")
    return value if isinstance(value, int) else None


def architecture_of(base: BaseModelSpec) -> str | None:
    """The kind of a base's architecture; None if it does not say."""
    value = _config_of(base).get("model_type")
    return value if isinstance(value, str) else None


def _config_of(base: BaseModelSpec) -> dict[str, Any]:
    """The `config.json` of a base; empty if it cannot be read."""
    try:
        found = json.loads(Path(base.config_file).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
