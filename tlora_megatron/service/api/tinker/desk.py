"""Everything that a tenant's Tinker clients have here, put together for one request."""

from __future__ import annotations

from dataclasses import dataclass

from tlora_megatron.config.base_model import BaseModelSpec
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.tinker.refusals import Gone, Refused
from tlora_megatron.service.api.tinker.state.checkpoints import Checkpoints
from tlora_megatron.service.api.tinker.state.futures import Futures
from tlora_megatron.service.api.tinker.state.names import ModelId
from tlora_megatron.service.api.tinker.state.sessions import Model, Session, Sessions
from tlora_megatron.service.request_log import RequestLog as Journal


@dataclass(frozen=True, slots=True)
class Desk:
    """One tenant's sessions, models, checkpoints and futures. It holds no state of its own."""

    service: Service
    tenant: str
    sessions: Sessions
    checkpoints: Checkpoints
    futures: Futures

    @classmethod
    def of(cls, service: Service, tenant: str) -> Desk:
        """The desk of a tenant."""
        sessions = Sessions(service.home.tenant(tenant))
        return cls(
            service,
            tenant,
            sessions,
            Checkpoints(service.home, sessions),
            Futures(service.home, service.store, sessions, tenant),
        )

    def open_session(self, session_id: str) -> Session:
        """A session that goes on.

        Raises:
            UnknownId: if the tenant has none of this id.
            Gone: if it has ended.
        """
        session = self.sessions.get(session_id)
        if session.ended is not None:
            raise Gone(
                f"session {session_id} must go on, got one that has ended: {session.ended}. Begin "
                "a new one; checkpoints of its models can be loaded there"
            )
        return session

    def open_model(self, model_id: str) -> Model:
        """A model that takes requests.

        Raises:
            UnknownId: if the tenant has none of this id.
            Gone: if it has left, or its session has ended.
        """
        self.open_session(ModelId.parse(model_id).session)
        model = self.sessions.model(model_id)
        if model.left is not None:
            raise Gone(f"model {model_id} must be there, got one that was unloaded")
        return model

    def held_bytes(self) -> int:
        """Bytes of requests and answers of all models."""
        models = (model for model in self.sessions.models() if model.job)
        return sum(self.journal(model).held_bytes() for model in models)

    def journal(self, model: Model) -> Journal:
        """The journal of the job that trains a model."""
        return Journal(self.service.home.job(model.job))

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
