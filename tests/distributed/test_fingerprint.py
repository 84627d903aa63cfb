"""A base's fingerprint: right models reproduce it in every layout, wrong ones do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.scenario import take_fingerprint
from tests.helpers.standing_world import forked, world
from tests.helpers.tiny_models import make_tiny_model

WORKER = Path(__file__).with_name("fingerprint_worker.py")
BASE = Path(__file__).parents[2] / "configs" / "quickstart" / "base"
"""It has learnt something: attention looks at positions, as that of random weights hardly does."""
LAYOUTS = ("tp=2", "tp=2,sp=1", "pp=2", "cp=2", "engine=own,tp=2,sp=1", "engine=own,pp=2", "dp=2")
UNSEEN_IN_BF16 = {"--use-rope-scaling", "--norm-epsilon 1e-6", "--norm-epsilon 1e-4"}
"""Off by less than three times bfloat16's rounding on this base: config.json's comparison refuses
them."""


def checked(base: Path, folder: Path) -> Path:
    """A folder with a base's files and its fingerprint."""
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
    cases = [f"{layout},dtype={d}" for layout in LAYOUTS for d in ("float32", "bfloat16")]
    world(WORKER, 2, base, file, *cases, "tp=2,wrong=--rotary-base 1000000")
    errors: dict[str, float] = json.loads(file.read_text())
    refused = {case for case, error in errors.items() if error < 0}
    assert refused == {"tp=2,wrong=--rotary-base 1000000"}
    assert max(error for case, error in errors.items() if "float32" in case) < 1e-5


@pytest.mark.parametrize("kind", ["llama3", "qwen2", "qwen3", "mistral"])
def test_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", kind, tied=kind == "qwen2")  # type: ignore[arg-type]
    file = tmp_path / "errors.json"
    folder = checked(model, tmp_path / "base")
    forked(WORKER, folder, file, "engine=own", "engine=own,dtype=bfloat16")
    assert min(json.loads(file.read_text()).values()) >= 0
