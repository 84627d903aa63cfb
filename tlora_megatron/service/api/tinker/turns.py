"""What makes a model and what lets it leave, one at a time."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from tlora_megatron.service.api.tinker.state.names import ModelId

_TURNS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()


def turn_of(model_id: ModelId) -> asyncio.Lock:
    """The lock under which a model's record is written.

    A retry must not write its draft over what was made, and who lets a model leave must know the
    job that it has got.
    """
    return _TURNS.setdefault(str(model_id), asyncio.Lock())
