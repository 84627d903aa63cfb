"""Bounds of one sampling process; without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerLimits:
    """The most that one sampling process takes."""

    adapters: int = 8
    """held at a time"""
    sequences: int = 128
    """that grow at a time"""
    step_tokens: int | None = None
    """new tokens of a step; None = 2048 on a CPU and 8192 on a GPU"""
    cache_bytes: int | None = None
    """memory of keys and values; None = 512 MB on a CPU, half of what a GPU has left"""
