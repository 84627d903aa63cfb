"""Why a client is refused, and the ids that clients hold.

s0123...             a session, made here
s0123...:train:0     the first model of the session, made by both sides alike
s0123...:sample:0    its first sampler
s0123...:train:0:7:optim_step            a model's request of number 7, which is also its future
tinker://s0123...:train:0/weights/NAME   a checkpoint of the model
s0123...:sample:0:7:sample:1/j4tdsp@5    a sequence, and the version of weights that drew it
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fastapi import Request, Response
from fastapi.routing import APIRoute

from tlora_megatron.service.api.gate import ApiError
from tlora_megatron.service.store import Model
from tlora_megatron.training.driven_requests import RequestError


class WireError(ValueError):
    """A body that is no request: cut off, of another type, or too large when unpacked."""


class UnknownId(ValueError):
    """An id that nothing has, or nothing of the caller's."""


class NotSigned(ValueError):
    """An address that this service has not signed, or whose time is over."""


class Refused(ValueError):
    """A request that is one of Tinker's, but wrong, or not done by this service."""


class Gone(RuntimeError):
    """A session, model or answer that was there and is not any more."""


class OutOfRoom(RuntimeError):
    """A request for which the tenant, or the disk, has no room until others are done with."""


_STATUS: Mapping[type[Exception], int] = {
    UnknownId: 404,
    NotSigned: 401,
    Gone: 410,
    WireError: 400,
    RequestError: 422,
    Refused: 422,
    OutOfRoom: 402,  # the client waits up to an hour with it, and says why
}
"""The status that tells a client what to do: it tries 5xx and 429 again, others not."""
_REFUSALS: tuple[type[Exception], ...] = (*_STATUS, OSError)


class TinkerRoute(APIRoute):
    """A route whose errors of state and wire become refusals."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await inner(request)
            except _REFUSALS as error:
                raise _as_refusal(error) from error

        return handle


def _as_refusal(error: Exception) -> Exception:
    for kind, status in _STATUS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(402, "the service's disk must have room for requests, got none left")
    return error


Kind = Literal["weights", "sampler_weights", "external_weights"]
"""The kind of a checkpoint: to train on, to sample from, or to take away."""
KINDS: tuple[Kind, ...] = get_args(Kind)

BY = "/"
"""Between the id of a sequence and the version that drew it; the base alone has none."""
_SESSION = r"s[0-9a-f]{24}"
_NUMBER = r"(?:0|[1-9]\d{0,8})"
_SEQUENCE = r"(?:0|[1-9]\d{0,18})"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_MODEL = re.compile(rf"({_SESSION}):train:({_NUMBER})")
_SAMPLER = re.compile(rf"({_SESSION}):sample:({_NUMBER})")
_REQUEST = re.compile(rf"({_MODEL.pattern}|{_SAMPLER.pattern}):({_SEQUENCE}):([a-z_]{{1,32}})")
_PATH = re.compile(rf"tinker://({_MODEL.pattern})/({'|'.join(KINDS)})/({_NAME})")


@dataclass(frozen=True, slots=True)
class ModelId:
    """A model that is trained; the SDK calls it a training run, too."""

    session: str
    number: int
    """Among the models of the session, from 0."""

    def __str__(self) -> str:
        return f"{self.session}:train:{self.number}"

    @property
    def job_name(self) -> str:
        """Name of the job that trains it."""
        return f"{self.session}-train-{self.number}"

    @classmethod
    def of(cls, model: Model) -> ModelId:
        """The id of a model's row."""
        return cls(model.session, model.number)

    @classmethod
    def parse(cls, text: str) -> ModelId:
        """Reads the id; raises `UnknownId` if it is none."""
        found = _matched(_MODEL, text, "model_id must be one that create_model gave")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class SamplerId:
    """A base or weights that a client samples from; the SDK calls it a sampling session."""

    session: str
    number: int

    def __str__(self) -> str:
        return f"{self.session}:sample:{self.number}"

    @classmethod
    def parse(cls, text: str) -> SamplerId:
        """Reads the id; raises `UnknownId` if it is none."""
        found = _matched(_SAMPLER, text, "sampling_session_id must be one that this service gave")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class RequestId:
    """A request of a model or a sampler, and the future of its answer."""

    of: ModelId | SamplerId
    seq_id: int
    """The client's own count: from 1 for models, where 0 is the model's creation."""
    op: str

    def __str__(self) -> str:
        return f"{self.of}:{self.seq_id}:{self.op}"

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Reads the id; raises `UnknownId` if it is none."""
        found = _matched(_REQUEST, text, "request_id must be one that this service gave")
        of, seq_id, op = found[1], int(found[6]), found[7]
        is_model = found[2] is not None
        return cls(ModelId.parse(of) if is_model else SamplerId.parse(of), seq_id, op)


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A checkpoint of a model."""

    model: ModelId
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """Its id among the model's checkpoints."""
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """Reads the path; raises `UnknownId` if it is none."""
        kinds = "weights/NAME, .../sampler_weights/NAME or .../external_weights/NAME"
        rule = f"a path must be tinker://MODEL/{kinds} as this service gave it"
        found = _matched(_PATH, text, rule)
        return cls(ModelId.parse(found[1]), found[4], found[5])  # type: ignore[arg-type]


def new_session() -> str:
    """Returns the id of a new session."""
    return f"s{secrets.token_hex(12)}"


def check_session(text: str) -> str:
    """Returns the id of a session, which names a folder; raises `UnknownId` if it is none."""
    rule = "session_id must be one that create_session gave"
    return _matched(re.compile(_SESSION), text, rule)[0]


def _matched(pattern: re.Pattern[str], text: str, rule: str) -> re.Match[str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise UnknownId(f"{rule}, got {text!r:.200}")
    return found
