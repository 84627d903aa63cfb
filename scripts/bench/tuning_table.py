"""How `tune.py` writes winners into `tlora_megatron/ops/tuned.json` beside their evidence.

Evidence stands under a name of its own, which is no part of any GPU's name: the kernels' look-up
passes over it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlora_megatron.ops.lora.triton import config as kernel_config

TABLE = Path(kernel_config.__file__).with_name("tuned.json")
EVIDENCE = "evidence"
_BOUNDS = ("rows", "in_size", "out_size")
Table = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """The best blocks of one kernel in one size bucket."""

    gpu: str
    kernel: str
    bounds: tuple[tuple[str, int], ...]
    """`rows`, `in_size` or `out_size` up to which it applies."""
    config: Any
    before_us: float
    """Geometric mean over the bucket's cases of the blocks used until now; inf: they do not run."""
    after_us: float
    torch: str
    triton: str
    commit: str
    date: str

    @property
    def fields(self) -> dict[str, int]:
        """What differs from the default."""
        default = type(self.config)()
        return {
            f.name: getattr(self.config, f.name)
            for f in dataclasses.fields(self.config)
            if getattr(self.config, f.name) != getattr(default, f.name)
        }

    @property
    def evidence(self) -> dict[str, Any]:
        """The record that goes beside the entry."""
        values = {n: getattr(self, n) for n in ("gpu", "kernel", "torch", "triton", "commit")}
        before_us = round(self.before_us, 2) if math.isfinite(self.before_us) else None
        times = {"before_us": before_us, "after_us": round(self.after_us, 2)}
        return {**values, **dict(self.bounds), **times, "date": self.date}


def gpu_key(name: str) -> str:
    """The part of a GPU's name that entries go under: `H100` of `NVIDIA H100 80GB HBM3`."""
    found = re.search(r"\b[A-Z]{1,3}\d{2,4}[A-Z]?\b", name)
    return found.group() if found else name


def add(table: Table, winner: Winner) -> Table:
    """The table with a winner's entry and evidence in place of older ones of the same bucket."""
    key, bounds = gpu_key(winner.gpu), dict(winner.bounds)
    entries = [dict(e) for e in table.get(key, [])]
    own = next((e for e in entries if _bounds(e) == bounds), None)
    if own is None:
        own = dict(bounds)
        entries.append(own)
    own[winner.kernel] = winner.fields
    records = [e for e in table.get(EVIDENCE, []) if not _same_bucket(e, winner)]
    records.append(winner.evidence)
    # The first entry that applies wins, so the narrower ones stand first.
    return {**table, key: sorted(entries, key=_width), EVIDENCE: records}


def _bounds(entry: dict[str, Any]) -> dict[str, int]:
    return {name: entry[name] for name in _BOUNDS if name in entry}


def _width(entry: dict[str, Any]) -> tuple[float, ...]:
    return tuple(entry.get(name, math.inf) for name in _BOUNDS)


def _same_bucket(record: dict[str, Any], winner: Winner) -> bool:
    same = record["gpu"] == winner.gpu and record["kernel"] == winner.kernel
    return same and _bounds(record) == dict(winner.bounds)


def read(path: Path) -> Table:
    """The table of a file; empty if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, table: Table) -> None:
    """Writes a table, an entry or record a line."""
    parts = []
    for key, entries in table.items():
        lines = ",\n".join(f"    {json.dumps(entry)}" for entry in entries)
        parts.append(f"  {json.dumps(key)}: [\n{lines}\n  ]" if entries else f"  {key!r}: []")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


@contextlib.contextmanager
def blocks_in_use(**configs: Any) -> Iterator[None]:
    """Every linear uses these blocks, `down=DownConfig(...)` and so on, whatever its size."""
    fields = {
        kernel: {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        for kernel, config in configs.items()
    }
    before = kernel_config._table
    kernel_config._table = lambda: {"": [fields]}  # type: ignore[assignment]
    kernel_config.kernel_config.cache_clear()
    try:
        yield
    finally:
        kernel_config._table = before
        kernel_config.kernel_config.cache_clear()
