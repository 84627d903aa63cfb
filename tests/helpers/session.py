"""Environment variables by which all processes of a test session know what they share."""

from __future__ import annotations

WORLD_SERVER = "TLORA_WORLD_SERVER"
"""Abstract socket of the process that `standing_world` forks ranks from."""
ORACLE_CACHE = "TLORA_ORACLE_CACHE"
"""Folder of the oracle's results; without it every call trains."""
SEED = "TLORA_TEST_SEED"
"""What tests draw their inputs by: 0 unless told, a number, or "fresh" for another each run."""
