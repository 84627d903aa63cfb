"""The engine of one host does what every engine has to do; `slurm` and `ray`: tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_case import FAKE, EngineCase, OpenEngine
from tlora_megatron.service.engines.local import LocalEngine


@pytest.fixture
def open_engine(root: Path) -> Iterator[OpenEngine]:
    engines = []

    def open_engine() -> LocalEngine:
        engines.append(LocalEngine(root, 0, slots=4, preforked=0, rank_command=FAKE))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


class TestLocal(EngineCase):
    pass
