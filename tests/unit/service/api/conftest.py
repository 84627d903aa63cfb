"""A service over HTTP, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.http_service import Api, open_api, put_file
from tests.helpers.live_service import folder_in_memory
from tlora_megatron.service.store import TenantLimits


@pytest.fixture
def settings() -> dict[str, Any]:
    """What `api` is opened with."""
    return {}


@pytest.fixture
def api(settings: dict[str, Any]) -> Iterator[Api]:
    """A service of its own, with nobody's jobs."""
    with folder_in_memory() as folder, open_api(folder / "service", **settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def still() -> Iterator[Api]:
    """A service that refuses all that a module's tests send, and keeps nothing of it."""
    with folder_in_memory() as folder, open_api(folder / "service") as api:
        api.store.tenants.set_limits("ann", TenantLimits(requests_per_s=1000.0))
        put_file(api)
        yield api
