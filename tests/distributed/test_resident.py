"""Jobs join, leave, come back and fail beside others, whose losses and adapters keep their bits.

A few schedules are always tried; with TLORA_ALL_TESTS=1 a hundred in each layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.helpers.resident_case import Command, Resident, resident
from tests.helpers.session import ALL_TESTS
from tlora_megatron.training.metrics import read_metrics

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp_size": 2},
    "TP2 SP": {"tp_size": 2, "sequence_parallel": True},
    "TP2 rank exchange": {"tp_size": 2, "lora_sharding": "rank_exchange"},
    "PP2": {"pp_size": 2},
    "DP2 sharded optimizer": {"shard_optimizer": True},
}
NUM_STEPS = 6
NUM_SCHEDULES = 100 if ALL_TESTS else 2
_numbers = count()


class Part(NamedTuple):
    job: str
    joins_at: int
    """Look of the first rank for commands, about one a round."""
    fate: str
    """stays, cancelled, moves (leaves with a checkpoint and comes back), or fails."""
    leaves_after: int


PARTS = st.builds(
    Part,
    job=st.sampled_from(["attention", "mlp", "everything", "outputs", "pairs"]),
    joins_at=st.integers(1, 20),
    fate=st.sampled_from(["stays", "stays", "cancelled", "moves", "fails"]),
    leaves_after=st.integers(0, 12),
)
SCHEDULES = st.lists(PARTS, min_size=2, max_size=5)


@pytest.fixture(scope="module", params=LAYOUTS)
def gang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gang]:
    with resident(tmp_path_factory.mktemp("resident"), 2, LAYOUTS[request.param]) as opened:
        yield Gang(opened)


class Gang:
    """A super-model, and what each job of the scenario makes of it alone."""

    def __init__(self, opened: Resident) -> None:
        self.opened = opened
        self.pairs = opened.folder / "pairs.jsonl"
        rows = map(json.loads, (opened.folder / "everything.jsonl").read_text().splitlines())
        pairs = ({"prompt": r["prompt"], "chosen": r["completion"], "rejected": "no"} for r in rows)
        self.pairs.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        self.alone = cache(self._alone)

    def coming(self, look: int, name: str, job: str, fate: str = "stays") -> list[Command]:
        changes: dict[str, Any] = {"portion_tokens": 100, "max_steps": NUM_STEPS}
        if job == "pairs":
            job = "everything"
            changes |= {"preference": {}, "data": {"train": str(self.pairs)}, "batch_size": 3}
        if fate == "fails":
            optimizer = {**self.opened.documents[job]["optimizer"], "lr": 1e38}
            changes |= {"optimizer": optimizer, "on_nonfinite": "fail"}
        return self.opened.coming(look, name, job, **changes)

    def result(self, name: str) -> tuple[list[float], bytes]:
        folder = self.opened.job_dir(name)
        losses = [r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
        return losses, (folder / "adapter" / "adapter_model.safetensors").read_bytes()

    def _alone(self, job: str) -> tuple[list[float], bytes]:
        name = f"alone-{job}"
        self.opened.run(self.coming(1, name, job))
        return self.result(name)

    def commands(self, part: Part, name: str) -> list[Command]:
        found = self.coming(part.joins_at, name, part.job, part.fate)
        leaves_at = part.joins_at + part.leaves_after
        if part.fate in ("cancelled", "moves"):
            body = {"save": part.fate == "moves"}
            found.append((leaves_at, {"kind": "leave", "job": name, "body": body}))
        if part.fate == "moves":
            found += self.coming(leaves_at, name, part.job)
        return found


@settings(
    max_examples=NUM_SCHEDULES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(parts=SCHEDULES)
@example(parts=[Part("mlp", 1, "stays", 0), Part("pairs", 2, "moves", 5)])
@example(parts=[Part("pairs", 1, "fails", 0), Part("pairs", 2, "stays", 0)])
def test_others_keep_their_bits(gang: Gang, parts: Sequence[Part]) -> None:
    number = next(_numbers)
    names = [f"s{number}-{index}-{part.job}" for index, part in enumerate(parts)]
    expected = [gang.alone(part.job) for part in parts]
    commands = [c for p, name in zip(parts, names, strict=True) for c in gang.commands(p, name)]
    events = gang.opened.run(commands)
    for part, name, alone in zip(parts, names, expected, strict=True):
        last = [event for event in events if event[1] == name][-1]
        if part.fate in ("stays", "moves"):
            assert last[0] == "ended", (name, last)
            assert last[2] == {"status": "finished", "reason": None, "step": NUM_STEPS}
            assert gang.result(name) == alone, name
        elif part.fate == "fails":
            assert last[2]["status"] == "failed", (name, last)
        else:
            assert last[0] in ("left", "ended"), (name, last)


def test_unlike_data_are_refused_and_long_mail_arrives(gang: Gang) -> None:
    name = f"unlike-{next(_numbers)}"
    events = gang.opened.run([*gang.coming(1, name, "mlp")[:1], (1, {"kind": "z" * 9000})])
    told = {kind: (job, body) for kind, job, body in events}
    assert told["refused"][0] == name
    assert "must read the same data for job" in told["refused"][1]["error"]
    assert f"'{'z' * 9000}' is not known here" in told["note"][1]["message"]
