"""Bases whose documents touch each other are refused by all processes, in the run's own dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")

from tests.helpers.deepspeed_cases import may_abort_behind, zero
from tests.helpers.deepspeed_models import APART, MIXED, write_untrained
from tests.helpers.standing_world import forked, world

WORKER = Path(__file__).with_name("deepspeed_isolation_worker.py")
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, zero(0)),
    "DP2 ZeRO-3": (2, zero(3)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_families_with_convolutions_are_refused_and_others_taken(name: str, tmp_path: Path) -> None:
    size, deepspeed = WORLDS[name]
    cases = {}
    for family in (*APART, *MIXED):
        for dtype in ("float32", "bfloat16"):
            section = write_untrained(tmp_path, family, dtype)
            cases[f"{family} {dtype}"] = deepspeed | {"tlora": section}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    with may_abort_behind(*(tmp_path / f"{rank}.json" for rank in range(size))):
        run = forked if size == 1 else lambda *words: world(words[0], size, *words[1:])
        run(WORKER, file, tmp_path)
    first, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size))
    assert all(other == first for other in others)
    for case, why in first.items():
        rule = r"must keep the documents of a micro-batch apart, got" if "lfm2" in case else ""
        assert rule in why, case
        assert bool(why) == bool(rule), (case, why)
