"""A job's losses and adapter have one sha256: alone, again, beside anybody, resumed beside others.

Hypothesis draws the mixes, from the space of `scripts.bench.determinism`, which also runs them at
the size of a real model. One base model serves all mixes of a size and layout, so that a mix costs
seconds. A mix that fails prints itself; it is not made smaller, which would take minutes.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from scripts.bench.determinism.__main__ import Training, companies, start
from scripts.bench.determinism.cases import CASES, SIZES, Mix, cases_of
from tests.helpers.exact_operations import KINDS, OPERATIONS, Shapes, search
from tests.helpers.standing_world import world
from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.packing.packing import RoundShape

pytestmark = pytest.mark.gpu
STEPS = 6
"""Atomics show in losses from the third step on."""
EXACTNESS = Exactness(short_document=256, long_document=600)
"""All classes of documents at both sizes."""
WITH_HEADS = ("heads of 64", "heads of 128")
"""Sizes of base models."""
ONE = [(name, case) for name in WITH_HEADS for case in cases_of(1)]


def mixes(name: str) -> st.SearchStrategy[Mix]:
    """Draws mixes of a size; hypothesis begins with one whose jobs are alike, which is left out."""
    randoms = st.randoms(use_true_random=False)
    any_mix = randoms.map(lambda draw: SIZES[name].mix(draw, STEPS))
    return any_mix.filter(lambda mix: len({plan.rank for plan in mix.first()}) > 1)


def drawn(count: int, *, by: str) -> Callable[[Any], Any]:
    """Settings of a test that draws so many mixes, other ones for each name."""

    def with_settings(test: Any) -> Any:
        patient = settings(
            max_examples=count,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        return seed(zlib.crc32(by.encode()))(patient(test))

    return with_settings


@pytest.fixture(scope="module")
def training(request: pytest.FixtureRequest, groups: ParallelGroups) -> Iterator[Training]:
    """The base model of a size and case, with exactness."""
    name, case = request.param
    training = start(SIZES[name], CASES[case], EXACTNESS, default=False)
    yield training
    training.run.close()


@pytest.mark.parametrize(
    ("training", "name", "case"),
    [((name, case), name, case) for name, case in ONE],
    indirect=["training"],
    ids=[f"{name}, {case}" for name, case in ONE],
)
def test_a_job_has_its_bits_in_any_company(training: Training, name: str, case: str) -> None:
    @drawn(3 if case == "tp1" else 1, by=f"{name}, {case}")
    @given(mix=mixes(name))
    def whoever_is_beside(mix: Mix) -> None:
        (_, alone), *others = companies(training, mix, STEPS)
        different = [company for company, found in others if found.sha256() != alone.sha256()]
        assert not different

    whoever_is_beside()


@pytest.mark.parametrize("training", [("heads of 64", "tp1")], indirect=True)
def test_without_exactness_a_job_has_other_bits_every_time(training: Training) -> None:
    """Or the mixes would not show what is promised."""
    size = SIZES["heads of 64"]
    fast = Training(training.run, RoundShape(), size.micro_batch_tokens)
    (_, alone), *others = companies(fast, size.mix(Random(0), STEPS), STEPS)
    assert any(found.sha256() != alone.sha256() for _, found in others)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_not_see_what_lies_around_its_rows(name: str) -> None:
    shapes = Shapes.here()
    exactness = Exactness(short_document=shapes.unit, long_document=2 * shapes.unit)
    found = search(OPERATIONS[name](shapes), exactness, shapes.unit, repeats=8)
    assert found == dict.fromkeys(KINDS, "")


@pytest.mark.multigpu
@pytest.mark.parametrize("name", WITH_HEADS)
def test_two_gpus(name: str, tmp_path: Path) -> None:
    @drawn(1, by=name)
    @given(mix=mixes(name))
    def whoever_is_beside(mix: Mix) -> None:
        mix.write(tmp_path / "mix.json")
        assert trained(2, name, tmp_path) == dict.fromkeys(cases_of(2), ("5", "5"))

    whoever_is_beside()


def trained(world_size: int, name: str, folder: Path) -> dict[str, tuple[str, str]]:
    """Trains the folder's mix in every layout; returns the number of runs and of equal ones."""
    path = folder / "rows.csv"
    path.unlink(missing_ok=True)
    options = ("--size", name, "--steps", STEPS, "--rounds", 0, "--csv", path)
    world("scripts.bench.determinism", world_size, *options, "--mix", folder / "mix.json")
    with path.open(newline="") as file:
        return {row["layout"]: (row["runs"], row["equal"]) for row in csv.DictReader(file)}
