"""Models of Megatron's trainers are held to the base's fingerprint, and must keep documents
apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scenario import take_fingerprint
from tests.helpers.session import ALL_TESTS
from tests.helpers.standing_world import forked, world

WORKER = Path(__file__).with_name("fingerprint_worker.py")
BASE = Path(__file__).parents[2] / "configs" / "quickstart" / "base"
"""It has learnt something: attention looks at positions, as that of random weights hardly does."""
LAYOUTS = ("tp=2", "tp=2,sp=1", "pp=2", "cp=2", "engine=own,tp=2,sp=1", "engine=own,pp=2", "dp=2")
UNSEEN_IN_BF16 = {"--use-rope-scaling", "--norm-epsilon 1e-6", "--norm-epsilon 1e-4"}
"""Off by less than three times bfloat16's rounding on this base: config.json's comparison refuses
them."""


def checked(base: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    take_fingerprint(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checked(BASE, tmp_path_factory.mktemp("fingerprint") / "base")


def test_wrong_models_are_refused(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "errors.json"
    cases = ("engine=own", "engine=built", "engine=built,tokens=64", "engine=own,dtype=bfloat16")
    forked(WORKER, base, file, *cases, "dtype=bfloat16", "wrong=all", "wrong=all,dtype=bfloat16")
    errors: dict[str, float] = json.loads(file.read_text())
    accepted = {case for case, error in errors.items() if error >= 0}
    unseen = {f"wrong=all,dtype=bfloat16 {name}" for name in UNSEEN_IN_BF16}
    assert accepted - unseen == {*cases, "dtype=bfloat16"}
    exact = [errors[case] for case in cases if "bfloat16" not in case]
    assert max(exact) < 1e-5


def test_right_models_are_accepted_in_every_layout(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "errors.json"
    cases = [f"{layout},dtype=float32" for layout in LAYOUTS]
    cases += [f"{layout},dtype=bfloat16" for layout in (LAYOUTS if ALL_TESTS else LAYOUTS[1::3])]
    world(WORKER, 2, base, file, *cases, "tp=2,wrong=--rotary-base 1000000")
    errors: dict[str, float] = json.loads(file.read_text())
    refused = {case for case, error in errors.items() if error < 0}
    assert refused == {"tp=2,wrong=--rotary-base 1000000"}
    assert max(error for case, error in errors.items() if "float32" in case) < 1e-5


ISOLATION = Path(__file__).with_name("isolation_worker.py")
KINDS = ("rope=plain", "rope=yarn", "rope=hybrid", "rope=moe")
LEAKY_LAYOUTS = (
    "tp=2", "tp=2,sp=1,recompute=full", "pp=2,recompute=full", "pp=2,vp=2", "cp=2", "dp=2",
    "rope=moe,tp=2,sp=1", "rope=moe,ep=2,rows=alltoall",
)  # fmt: skip
MOVES = "the model GPTModel must keep the documents of a micro-batch apart, got losses of one docum"
HARMS = "the model GPTModel must keep the documents of a micro-batch apart, got gradients of one"


def refusals(folder: Path, ranks: int, *cases: str) -> dict[str, str]:
    """What each case is refused for, which is the same on all ranks."""
    if ranks == 1:
        forked(ISOLATION, folder, *cases)
        return dict(json.loads((folder / "0.json").read_text()))
    world(ISOLATION, ranks, folder, *cases)
    first, *others = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks))
    assert all(other == first for other in others)
    return dict(first)


def test_one_process(tmp_path: Path) -> None:
    kinds = [f"{kind},dtype={dtype}" for kind in KINDS for dtype in ("float32", "bfloat16")]
    bad = [f"{kind},leak={leak}" for kind in kinds for leak in ("conv", "back")]
    found = refusals(tmp_path, 1, *kinds, *(case for case in bad if "hybrid" not in case))
    for case, why in found.items():
        has_experts = "moe" in case
        expected = ""
        if "leak" in case:
            # A little passes for the rounding of experts, but not in the gradients.
            expected = HARMS if "back" in case or has_experts else MOVES
        assert why.startswith(expected), (case, why)
        assert bool(why) == bool(expected), (case, why)


def test_all_ranks_of_every_layout_refuse_alike(tmp_path: Path) -> None:
    bad = [f"{layout},leak={leak}" for layout in LEAKY_LAYOUTS for leak in ("conv", "back")]
    found = refusals(tmp_path, 2, *LEAKY_LAYOUTS, *bad)
    assert {case for case, why in found.items() if why} == set(bad)
    for case in bad:
        rule = HARMS if "back" in case or "moe" in case else MOVES
        assert found[case].startswith(rule), found[case]
