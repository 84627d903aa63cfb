"""A job's losses and adapter have one sha256: alone, again, beside anybody, resumed beside others.

The mixes are drawn by `scripts.bench.determinism`, which also runs them at the size of a real
model. One base model serves all mixes of a size, so that a mix costs seconds.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench.determinism.__main__ import companies, start
from scripts.bench.determinism.cases import CASES, SIZES, cases_of
from scripts.bench.determinism.leaks import KINDS, search
from scripts.bench.determinism.operations import Shapes, operations
from scripts.bench.determinism.training import Training
from tests.helpers.one_process import one_process_groups
from tests.helpers.standing_world import world
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.training.packing.packing import RoundShape

pytestmark = pytest.mark.gpu
STEPS = 6
"""Atomics show in losses from the third step on."""
EXACTNESS = Exactness(short_document=256, long_document=600)
"""All classes of documents at both sizes."""
BY_SIZE = {"heads of 64": (1, 8, 12), "heads of 128": (4, 10, 13)}
"""Seeds of mixes: own ranks 1 to 128, with and without dropout, up to four neighbours at once."""
ONE = [
    (name, case, seed)
    for name, seeds in BY_SIZE.items()
    for case in cases_of(1)
    for seed in (seeds if case == "tp1" else seeds[:1])
]


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    with one_process_groups():
        yield


@pytest.fixture(scope="module")
def training(request: pytest.FixtureRequest, groups: None) -> Iterator[Training]:
    """The base model of a size and case, with exactness."""
    name, case = request.param
    training = start(SIZES[name], CASES[case], EXACTNESS, default=False)
    yield training
    training.run.close()


@pytest.mark.parametrize(
    ("training", "name", "seed"),
    [((name, case), name, seed) for name, case, seed in ONE],
    indirect=["training"],
    ids=[f"{name}, {case}, mix {seed}" for name, case, seed in ONE],
)
def test_a_job_has_its_bits_in_any_company(training: Training, name: str, seed: int) -> None:
    (_, alone), *others = companies(training, SIZES[name].mix(seed, STEPS), STEPS)
    different = [company for company, found in others if found.sha256() != alone.sha256()]
    assert not different


@pytest.mark.parametrize("training", [("heads of 64", "tp1")], indirect=True)
def test_without_exactness_a_job_has_other_bits_every_time(training: Training) -> None:
    """Or the mixes would not show what is promised."""
    size = SIZES["heads of 64"]
    fast = Training(training.run, RoundShape(), size.micro_batch_tokens)
    (_, alone), *others = companies(fast, size.mix(0, STEPS), STEPS)
    assert any(found.sha256() != alone.sha256() for _, found in others)


OPERATIONS = (
    "attention, 1 document",
    "attention, long and short",
    "attention, middle and short",
    "fc2, frozen",
    "fc2, rank 16, dropout 0.0",
    "fc2, adapted by others",
    "vocabulary head",
    "sum of losses",
)
"""Those that leak without exactness, and what they meet."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_not_see_what_lies_around_its_rows(name: str) -> None:
    shapes = Shapes.here()
    exactness = Exactness(short_document=shapes.unit, long_document=2 * shapes.unit)
    found = search(operations(shapes)[name], exactness, shapes.unit, repeats=8)
    assert found == dict.fromkeys(KINDS, "")


@pytest.mark.multigpu
@pytest.mark.parametrize("size", BY_SIZE)
def test_two_gpus(size: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    options = ("--size", size, "--seeds", 1, "--steps", STEPS, "--rounds", 0, "--csv", path)
    output = world("scripts.bench.determinism", 2, *options)
    with path.open(newline="") as file:
        rows = {row["layout"]: (row["runs"], row["equal"]) for row in csv.DictReader(file)}
    assert rows == dict.fromkeys(cases_of(2), ("5", "5")), output
