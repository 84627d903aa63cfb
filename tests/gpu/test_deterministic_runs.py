"""`run.deterministic` through the entry points: a job's losses and file have one sha256.

`tlora train`, DeepSpeed and Megatron-LM's flag each run the watched job alone, again, and beside
jobs of which one's weights overflow and one ends early. The last run is also killed by SIGKILL, and
the job goes on there and in a run of other jobs. All entry points are run at once.
`TLORA_ENTRY_POINTS_ON_CPU=1` runs the same commands on a small model without a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import Future

import pytest

from tests.helpers.entry_points import ENDS_IN_NAN, ON_GPU, OUTS, OWN, REFUSED, Passed, pass_through

pytestmark = [] if os.environ.get("TLORA_ENTRY_POINTS_ON_CPU") else [pytest.mark.gpu]
_NO_DEEPSPEED = importlib.util.find_spec("deepspeed") is None
_DEEPSPEED = pytest.mark.skipif(_NO_DEEPSPEED, reason="needs deepspeed")
ENTRY_POINTS = (
    "tlora",
    "tlora, FP8 base",
    pytest.param("ZeRO-0", marks=_DEEPSPEED),
    pytest.param("ZeRO-2", marks=_DEEPSPEED),
    pytest.param("megatron_lm", marks=pytest.mark.megatron_lm),
)
each_entry_point = pytest.mark.parametrize("name", ENTRY_POINTS)

EntryPoints = dict[str, Future[Passed]]


@pytest.fixture(scope="module")
def entry_points(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EntryPoints:
    """Each selected entry point behind all its runs, or how one has failed."""
    names = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if item.path == request.path
        and isinstance(item, pytest.Function)
        and not any(mark.args[:1] != (False,) for mark in item.iter_markers("skip"))
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    return pass_through(tmp_path_factory.mktemp("entry_points"), dict.fromkeys(names))


@each_entry_point
def test_a_job_has_one_sha256_whatever_happens_around_it(
    name: str, entry_points: EntryPoints
) -> None:
    entry_point, _ = entry_points[name].result()
    expected = entry_point.sha256("alone")
    assert {out: entry_point.sha256(out) for out in OUTS} == dict.fromkeys(OUTS, expected)


@each_entry_point
def test_what_happens_around_it_is_what_was_meant(name: str, entry_points: EntryPoints) -> None:
    entry_point, _ = entry_points[name].result()
    fingerprints = [entry_point.summary(out)["run"]["deterministic"] for out in OUTS]
    assert fingerprints == fingerprints[:1] * len(OUTS)
    assert not ON_GPU or fingerprints[0]["kernels"] == "cuda"
    for out in ENDS_IN_NAN:
        jobs = entry_point.summary(out)["jobs"]
        found = {job: jobs[job]["status"] for job in (OWN, "wrong", "short", "long")}
        assert found == dict.fromkeys(found, "finished") | {"wrong": "failed"}


@each_entry_point
def test_a_variable_that_contradicts_is_refused_and_others_are_set(
    name: str, entry_points: EntryPoints
) -> None:
    """On a GPU the other runs would be refused, too, had CUDA started before they are set."""
    entry_point, said = entry_points[name].result()
    assert "NCCL_ALGO must be Ring with run.deterministic, got Tree: unset it" in said
    assert not (entry_point.folder / REFUSED.out / "summary.json").exists()
