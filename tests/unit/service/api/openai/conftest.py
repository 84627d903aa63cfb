"""The unmodified `openai` client before a service that nobody serves: tests move its jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from tests.helpers.http_service import Api, listening

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
CHATS = "".join(json.dumps(CHAT) + "\n" for _ in range(3)).encode()


@pytest.fixture
def address(api: Api) -> Iterator[str]:
    with listening(api.app) as found:
        yield found


@pytest.fixture
def client_of(api: Api, address: str) -> Iterator[Callable[..., OpenAI]]:
    """Makes clients of tenants, which retry nothing unless told."""
    made: list[OpenAI] = []

    def make(tenant: str = "ann", **options: Any) -> OpenAI:
        options = {"max_retries": 0, **options}
        made.append(OpenAI(base_url=f"{address}/v1", api_key=api.token(tenant), **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(client_of: Callable[..., OpenAI]) -> OpenAI:
    return client_of()


@pytest.fixture
def file(client: OpenAI) -> str:
    """Id of an uploaded file of three chats."""
    return client.files.create(file=("chats.jsonl", CHATS), purpose="fine-tune").id


class Still(NamedTuple):
    """A service that keeps nothing of what a module's tests send: they are refused."""

    api: Api
    client: OpenAI
    file: str

    @property
    def files(self) -> list[Path]:
        """Files in the tenant's folder beside the one file."""
        folder = self.api.home.tenant("ann") / "files"
        return [path for path in folder.iterdir() if path.name != self.file]


@pytest.fixture(scope="module")
def still(still: Api) -> Iterator[Still]:
    with listening(still.app) as address:
        options = {"base_url": f"{address}/v1", "max_retries": 0}
        with OpenAI(api_key=still.token(), **options) as client:
            file = client.files.create(file=("chats.jsonl", CHATS), purpose="fine-tune").id
            yield Still(still, client, file)
