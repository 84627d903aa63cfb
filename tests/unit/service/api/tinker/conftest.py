"""The unmodified `tinker` client before a service whose gang is played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import tinker

from tests.helpers.http_service import Door, listening
from tests.helpers.played_models import PlayedModels, playing
from tests.helpers.tinker.clients import closing_clients


class Played(NamedTuple):
    """A service on a port, and what plays its gang."""

    door: Door
    address: str
    models: PlayedModels

    def client(self, tenant: str = "ann") -> tinker.ServiceClient:
        """The SDK's client of a tenant."""
        return tinker.ServiceClient(base_url=self.address, api_key=self.door.token(tenant))

    def rest(self, tenant: str = "ann") -> tinker.RestClient:
        """The SDK's client without a session."""
        return tinker.RestClient(base_url=self.address, api_key=self.door.token(tenant))


@pytest.fixture
def played(door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """A service that answers at once."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with (
        listening(door.app) as address,
        playing(door.home, door.store) as models,
        closing_clients(),
    ):
        yield Played(door, address, models)
