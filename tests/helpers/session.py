"""Environment variables by which all processes of a test session know what they share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

WORLD_SERVER = "TLORA_WORLD_SERVER"
"""Abstract socket of the process that `standing_world` forks ranks from."""
ORACLE_CACHE = "TLORA_ORACLE_CACHE"
"""Folder of the oracle's results; without it every call trains."""
SEED = "TLORA_TEST_SEED"
"""What tests draw their inputs by: 0 unless told, a number, or "fresh" for another each run."""

ALL_TESTS = bool(os.environ.get("TLORA_ALL_TESTS"))
"""True under `./scripts/test.sh all`."""


def further(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Cases that only `./scripts/test.sh all` runs: what others show one by one, together."""
    return dict(cases) if ALL_TESTS else {}
