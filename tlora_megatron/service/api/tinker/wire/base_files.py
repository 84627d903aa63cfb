"""Facts about a base model that clients are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tlora_megatron.config.schema import BaseModelSpec


def config_of(base: BaseModelSpec) -> dict[str, Any]:
    """The `config.json` of a base; empty if it cannot be read."""
    try:
        found = json.loads(Path(base.config_file).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def positions_of(base: BaseModelSpec) -> int | None:
    """Tokens of the longest sequence that a base is made for; None if it does not say."""
    found = config_of(base)
    found = found.get("text_config", found)
    value = found.get("max_position_embeddings")
    return value if isinstance(value, int) else None


def architecture_of(base: BaseModelSpec) -> str | None:
    """The kind of a base's architecture."""
    value = config_of(base).get("model_type")
    return value if isinstance(value, str) else None
