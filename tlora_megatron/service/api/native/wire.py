"""Shapes of requests and answers, for the OpenAPI page and for clients' types."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_EXAMPLE = """\
base_model: quickstart
name: mirror
data: {train: file-0123456789abcdef01234567}
lora: {rank: 16}
max_steps: 200
service: {gpus: 1, max_slowdown: 1.5, priority: 0}
"""


class JobAnswer(BaseModel):
    """A job; times are Unix seconds."""

    id: str
    name: str
    tenant: str
    state: str
    wish: str | None
    step: int
    num_steps: int | None
    tokens: int
    loss: float | None
    error: str | None
    gang: str | None
    gang_epoch: int | None
    submitted_at: float
    started_at: float | None
    ended_at: float | None


class JobsAnswer(BaseModel):
    """The jobs of a submit."""

    jobs: list[JobAnswer]
    warnings: list[str]
    served: bool


class JobsPage(BaseModel):
    """A page of jobs."""

    jobs: list[JobAnswer]
    next: str | None
    """`after` of the next page; null behind the last one."""
    counts: dict[str, int] | None
    served: bool


class CheckpointAnswer(BaseModel):
    """A checkpoint on the disk."""

    step: int
    bytes: int
    written_at: float


class CheckpointsAnswer(BaseModel):
    """The checkpoints of a job, the newest first."""

    checkpoints: list[CheckpointAnswer]


class ErrorBody(BaseModel):
    """Why a request was refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every refusal."""

    error: ErrorBody


_WORDS = {
    404: "there is no such job, or it is another tenant's",
    409: "the job's state, its name or the idempotency key forbids it",
}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Refusals of a route, for the OpenAPI page."""
    return {status: {"model": ErrorAnswer, "description": _WORDS[status]} for status in statuses}


DOCUMENT: dict[str, Any] = {
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "application/yaml": {"schema": {"type": "string"}, "example": _EXAMPLE},
                "application/json": {"schema": {"type": "object"}},
            },
        }
    },
    "responses": answers(409),
}
"""The OpenAPI page's description of a submit, besides its answer."""
