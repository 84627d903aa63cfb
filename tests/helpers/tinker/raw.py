"""Requests as the `tinker` client sends them, without the client."""

from __future__ import annotations

from typing import Any

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.helpers.http_service import BASE, Api
from tests.helpers.played_models import PlayedModels

MODEL = "s000000000000000000000000:train:0"


def datum(*tokens: int, **inputs: Any) -> types.Datum:
    """A sequence whose targets are its tokens and 1 more."""
    given = {"target_tokens": [token + 1 for token in tokens], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=given)


def message(*data: types.Datum, loss: str = "cross_entropy", config: Any = None) -> Any:
    """A pass in protobuf, as the SDK writes it."""
    wanted = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=wanted, model_id=MODEL, seq_id=7)
    return forward_backward_request_to_proto(request)


class Raw:
    """A tenant's requests below `/api/v1`; `models` plays the gang when it is told to."""

    def __init__(self, api: Api, tenant: str = "ann") -> None:
        self.http = api.client(tenant)
        self.models = PlayedModels(api.home, api.store)

    def get(self, route: str) -> httpx.Response:
        return self.http.get(f"/api/v1/{route}")

    def delete(self, route: str) -> httpx.Response:
        return self.http.delete(f"/api/v1/{route}")

    def post(self, route: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{route}", json=body)

    def session(self) -> str:
        made = self.post("create_session", sdk_version="0.38.0", tags=[])
        return str(made.json()["session_id"])

    def model(self, session_id: str | None = None, number: int = 0, **lora: Any) -> str:
        """A model of a session, or of a new one."""
        body = {"session_id": session_id or self.session(), "model_seq_id": number}
        found = self.post("create_model", **body, base_model=BASE, lora_config={"rank": 4, **lora})
        assert found.status_code == 200, found.text
        return str(found.json()["model_id"])

    def step(self, model_id: str, seq_id: int) -> httpx.Response:
        return self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params={})

    def forward_backward(self, model_id: str, seq_id: int, body: Any) -> httpx.Response:
        """Asks for a pass, given as `message`."""
        body.model_id, body.seq_id = model_id, seq_id
        return self.send(body.SerializeToString())

    def send(self, content: bytes) -> httpx.Response:
        headers = {"Content-Type": "application/x-protobuf"}
        return self.http.post("/api/v1/forward_backward", content=content, headers=headers)

    def future(self, model_id: str, seq_id: int) -> httpx.Response:
        """The answer to a step, once it is there."""
        return self.post("retrieve_future", request_id=f"{model_id}:{seq_id}:optim_step")

    def finish(self, session_id: str) -> None:
        assert self.post(f"sessions/{session_id}/finish").status_code == 200
