"""What a tenant's Tinker clients have here: sessions, models, samplers, checkpoints, futures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.checkpoints import Checkpoints
from tlora_megatron.service.api.tinker.errors import Gone, Refused, UnknownId
from tlora_megatron.service.api.tinker.futures import Futures
from tlora_megatron.service.api.tinker.names import ModelId, SamplerId, check_session
from tlora_megatron.service.request_log import RequestLog
from tlora_megatron.service.store import Model, Sampler, Session
from tlora_megatron.service.store.sessions import Sessions


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
        """The checkpoints of the tenant's models."""
        return Checkpoints(self.service.home, self.service.store, self.tenant)

    @property
    def futures(self) -> Futures:
        """The futures of the tenant's models."""
        return Futures(self.service.home, self.service.store, self.tenant)

    def session(self, session_id: str) -> Session:
        """The session of an id.

        Raises:
            UnknownId: if the tenant has none.
        """
        found = self.sessions.get(check_session(session_id), tenant=self.tenant)
        if found is None:
            raise UnknownId(f"session_id must be one of the tenant's, got {session_id!r:.200}")
        return found

    def open_session(self, session_id: str) -> Session:
        """A session that goes on.

        Raises:
            UnknownId: if the tenant has none of this id.
            Gone: if it has ended.
        """
        session = self.session(session_id)
        if session.ended is not None:
            raise Gone(
                f"session {session_id} must go on, got one that has ended: {session.ended}. Begin "
                "a new one; checkpoints of its models can be loaded there"
            )
        return session

    def model(self, model_id: str) -> Model:
        """The model of an id.

        Raises:
            UnknownId: if the tenant has none.
        """
        found = self.sessions.model(str(ModelId.parse(model_id)), tenant=self.tenant)
        if found is None:
            raise UnknownId(f"model_id must be one of the tenant's, got {model_id!r:.200}")
        return found

    def open_model(self, model_id: str) -> Model:
        """A model that takes requests.

        Raises:
            UnknownId: if the tenant has none of this id.
            Gone: if it has left, or its session has ended.
        """
        with self.service.store.database.read():
            self.open_session(ModelId.parse(model_id).session)
            model = self.model(model_id)
        if model.last_request is not None:
            raise Gone(f"model {model_id} must be there, got one that was unloaded")
        return model

    def sampler(self, sampler_id: str) -> Sampler:
        """The sampler of an id.

        Raises:
            UnknownId: if the tenant has none.
        """
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
        """The log of requests of the job that trains a model."""
        return RequestLog(self.service.home.job(model.job))

    def held_bytes(self) -> int:
        """Bytes of requests and answers of all models."""
        models = self.sessions.models(tenant=self.tenant)
        return sum(self.request_log(model).held_bytes() for model in models)

    def base(self, name: str) -> BaseModelSpec:
        """The base of a name.

        Raises:
            Refused: if the service offers none of this name.
        """
        bases = self.service.bases()
        if name not in bases:
            offered = ", ".join(bases) or "none: `tlora serve --base NAME=PATH` offers one"
            raise Refused(
                f"base_model must be one that this service offers ({offered}), got {name!r}"
            )
        return bases[name]


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
