"""The key `parallel.replicas`: replicas of the model, each with a layout of its own.

A list of mappings, or the short form `1xCP8@65536 + 2xTP2+SP@12288/selective + 4xTP1@6144`: how
many, sizes joined by `+`, then `@` the tokens of a micro-batch and `/` what is recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_args

from tlora_megatron.config.reader import ConfigError, must, nearest
from tlora_megatron.config.schema import Recompute, ReplicaSpec

_EXAMPLE = "write 1xCP8@65536 + 2xTP2+SP@12288/selective + 4xTP1@6144"
_PART = re.compile(
    r"(?:(?P<count>\d+)\s*x\s*)?(?P<sizes>[A-Za-z0-9+]+)"
    r"(?:@(?P<tokens>\d+))?(?:/(?P<recompute>\w+))?"
)
_SIZES = {"TP": "tp_size", "PP": "pp_size", "CP": "cp_size"}


def expand_short_form(raw: Any, path: str) -> Any:
    """Returns a short form as the list of mappings that it stands for; all else as it is.

    Raises:
        ConfigError: for a short form that is none, naming the part.
    """
    if not isinstance(raw, str):
        return raw
    # A `+` within a layout has no spaces around it and no count behind it.
    parts = re.split(r"\s+\+\s+|\s*\+\s*(?=\d+\s*x)", raw.strip())
    return [_expand(part, path) for part in parts]


def _expand(part: str, path: str) -> dict[str, Any]:
    match = _PART.fullmatch(part)
    if match is None:
        raise must(path, "be replicas like 2xTP2+SP@12288/selective", part, _EXAMPLE)
    found: dict[str, Any] = {"count": int(match["count"] or 1)}
    for size in match["sizes"].split("+"):
        for key, value in _read_size(size, path).items():
            if key in found:
                raise ConfigError(f"{path} must name each size once, got {part}")
            found[key] = value
    if match["tokens"]:
        found["micro_batch_tokens"] = int(match["tokens"])
    if match["recompute"]:
        if match["recompute"] not in get_args(Recompute):
            words = get_args(Recompute)
            rule_ = f"recompute one of {', '.join(words)}"
            raise must(path, rule_, match["recompute"], nearest(match["recompute"], words))
        found["recompute"] = match["recompute"]
    return found


def _read_size(text: str, path: str) -> dict[str, Any]:
    if text.upper() == "SP":
        return {"sequence_parallel": True}
    match = re.fullmatch(r"([A-Za-z]+)(\d+)", text)
    if match is None or match[1].upper() not in _SIZES:
        raise must(path, "name sizes as TPn, PPn, CPn or SP", text, _EXAMPLE)
    return {_SIZES[match[1].upper()]: int(match[2])}


def short_form(replicas: Sequence[ReplicaSpec]) -> str:
    """Returns the short form of replicas; `expand_short_form` reads the same ones from it."""
    return " + ".join(_short(spec) for spec in replicas)


def _short(spec: ReplicaSpec) -> str:
    sizes = [f"TP{spec.tp_size}"] if spec.tp_size > 1 else []
    sizes += ["SP"] if spec.sequence_parallel else []
    sizes += [f"PP{spec.pp_size}"] if spec.pp_size > 1 else []
    sizes += [f"CP{spec.cp_size}"] if spec.cp_size > 1 else []
    tokens = f"@{spec.micro_batch_tokens}" if spec.micro_batch_tokens is not None else ""
    recompute = f"/{spec.recompute}" if spec.recompute is not None else ""
    return f"{spec.count}x{'+'.join(sizes) or 'TP1'}{tokens}{recompute}"
