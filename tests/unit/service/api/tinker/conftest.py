"""The unmodified `tinker` client before a service whose gang is played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import tinker

from tests.helpers.http_service import Api, listening
from tests.helpers.played_models import PlayedModels, playing
from tests.helpers.tinker.clients import closing_clients
from tests.helpers.tinker.raw import Raw


class Played(NamedTuple):
    """A service on a port, and what plays its gang."""

    api: Api
    address: str
    models: PlayedModels

    def client(self, tenant: str = "ann") -> tinker.ServiceClient:
        """The SDK's client of a tenant."""
        return tinker.ServiceClient(base_url=self.address, api_key=self.api.token(tenant))

    def rest(self, tenant: str = "ann") -> tinker.RestClient:
        """The SDK's client without a session."""
        return tinker.RestClient(base_url=self.address, api_key=self.api.token(tenant))


@pytest.fixture
def played(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """A service that answers at once."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with listening(api.app) as address, playing(api.home, api.store) as models, closing_clients():
        yield Played(api, address, models)


@pytest.fixture
def client(api: Api) -> Raw:
    """Requests of ann's without the SDK."""
    return Raw(api)
