"""The modules of scripts/bench, importable for a test as they import one another."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@contextlib.contextmanager
def bench_modules() -> Iterator[SimpleNamespace]:
    """`load(name)` imports a script or helper; afterwards none is left in `sys.modules`."""
    names = sorted(p.stem for p in BENCH.glob("*.py"))
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(BENCH))
    try:
        yield SimpleNamespace(load=importlib.import_module)
    finally:
        sys.path.remove(str(BENCH))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update({name: m for name, m in before.items() if m is not None})
