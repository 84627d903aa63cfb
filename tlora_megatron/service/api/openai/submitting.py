"""Makes a job of a request for fine-tuning, once however often its client retries."""

from __future__ import annotations

import asyncio
import re
import secrets
import uuid
from typing import Any
from weakref import WeakValueDictionary

from tlora_megatron.config.reader import ConfigError, nearest
from tlora_megatron.service.api.access.gate import Caller
from tlora_megatron.service.api.errors import ApiError, missing, refused
from tlora_megatron.service.api.openai.asking import (
    Asked,
    Numbers,
    check_request,
    job_entry,
    numbers_of,
)
from tlora_megatron.service.api.openai.names import split_model
from tlora_megatron.service.api.openai.objects import DOOR
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting.submit import submit
from tlora_megatron.service.prepare.submission import ASKED
from tlora_megatron.service.store import Job, NotFound

RETRIED_WITHIN_S = 600.0
"""A retry is answered with the job of the same body that is no older."""
_PLACE = re.compile(r"jobs\[0\]\.")
_OWN_NAME = re.compile(r" \(job [^)]*\)")


class Submitting:
    """Makes jobs of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A retry waits for the request that it repeats: that may be at work still."""

    async def submit(
        self, asked: Asked, caller: Caller, *, is_retry: bool
    ) -> tuple[Job, dict[str, Any]]:
        """Submits a request's job.

        Args:
            asked: The request.
            caller: Who asks.
            is_retry: The client has sent it before and does not know whether it arrived.

        Returns:
            The job, and what is remembered of its request.

        Raises:
            ApiError: if the request cannot be met.
        """
        numbers = numbers_of(asked)
        check_request(asked)
        await self._service.read(self._check_names, asked, caller)
        async with self._turns.setdefault(f"{caller.tenant}/{_key(asked)}", asyncio.Lock()):
            known = await self._service.read(self._known, asked, caller) if is_retry else None
            return known or await self._submit(asked, numbers, caller)

    async def _submit(
        self, asked: Asked, numbers: Numbers, caller: Caller
    ) -> tuple[Job, dict[str, Any]]:
        remembered = _remembered(asked, numbers)
        try:
            entry = job_entry(
                asked,
                numbers,
                name=f"{asked.suffix or 'ft'}-{secrets.token_hex(4)}",
                train=asked.training_file,
                validation=asked.validation_file,
            )
            document = {"base_model": asked.model, "jobs": [entry]}
            key = f"{_key(asked)}{uuid.uuid4().hex}"
            accepted = await submit(self._service, caller, document, key=key, asked=remembered)
        except ConfigError as error:
            raise ApiError(400, _OWN_NAME.sub("", _PLACE.sub("", str(error)))) from error
        return accepted.jobs[0], remembered

    def _known(self, asked: Asked, caller: Caller) -> tuple[Job, dict[str, Any]] | None:
        """The job that a retry asks for, if its first request arrived."""
        jobs = self._service.store.jobs
        known = jobs.newest_of_key(_key(asked), tenant=caller.tenant, within_s=RETRIED_WITHIN_S)
        return None if known is None else (known, jobs.document(known.id)[ASKED])

    def _check_names(self, asked: Asked, caller: Caller) -> None:
        """Refuses a base or a file that is not there, in the names of the request's fields."""
        self._check_base(asked.model)
        for name in ("training_file", "validation_file"):
            file = getattr(asked, name)
            if file is not None:
                self._check_file(name, file, caller)

    def _check_base(self, model: str) -> None:
        bases = self._service.bases()
        if model in bases:
            return
        if split_model(model).job is not None:
            raise refused("model", "be a base: an adapter is not trained on here", model)
        hint = nearest(model, bases) or f"the service offers {', '.join(bases) or 'none'}"
        error = refused("model", "be a base of the service", model, hint)
        error.code = "model_not_found"
        raise error

    def _check_file(self, name: str, file: str, caller: Caller) -> None:
        try:
            self._service.store.uploads.get(file, tenant=caller.tenant)
        except (NotFound, UnicodeEncodeError):
            error = missing(name, file)
            error.status, error.param = 400, name
            raise error from None


def _key(asked: Asked) -> str:
    """The beginning of the keys of all requests with this body."""
    return f"{DOOR}/{asked.digest}/"


def _remembered(asked: Asked, numbers: Numbers) -> dict[str, Any]:
    return {
        "door": DOOR,
        "model": asked.model,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
        "suffix": asked.suffix,
        "seed": asked.seed or 0,
        "metadata": asked.metadata,
        "hyperparameters": numbers.model_dump(),
    }
