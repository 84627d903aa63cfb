"""With `run.deterministic` a job has one sha256: alone, beside anybody, stopped and resumed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.scenario import losses, make_scenario
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.session import ALL_TESTS

JOB = "everything"
STEPS = 4
TP2 = ("parallel.tp_size=2",)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "DP2": (),
    "TP2": TP2,
    "TP2+SP": (*TP2, "parallel.sequence_parallel=true"),
    "TP2 nano-batches": (*TP2, "run.nano_batches=2"),
    "PP2": ("parallel.pp_size=2", "run.recompute=full"),
    "TP2+SP FP8": (*TP2, "parallel.sequence_parallel=true", "base_model.quantization=fp8"),
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@st.composite
def company(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Two or three jobs of any rank, targets, dropout and batch, some of which end in NaN."""
    jobs = []
    for index in range(draw(st.integers(2, 3))):
        targets = draw(st.lists(st.sampled_from(TARGETS), min_size=1, max_size=4, unique=True))
        lora = {
            "rank": draw(st.sampled_from([1, 4, 16, 24])),
            "dropout": draw(st.sampled_from([0.0, 0.2])),
            "target_modules": targets,
        }
        optimizer = {"lr": 1e30} if draw(st.booleans()) else {}
        jobs.append({
            "name": f"other{index}",
            "data": {"train": f"{draw(st.sampled_from(['attention', 'mlp', 'outputs']))}.jsonl"},
            "max_seq_len": draw(st.sampled_from([40, 100])),
            "batch_size": draw(st.integers(1, 9)),
            "max_steps": draw(st.integers(1, 6)),
            "lora": lora,
            "optimizer": optimizer,
            "on_nonfinite": "fail",
            "portion_tokens": draw(st.sampled_from([None, 60, 128])),
        })  # fmt: skip
    return jobs


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with the job alone and its digest in every layout."""
    path = make_scenario(tmp_path_factory.mktemp("deterministic"))
    document = json.loads(path.read_text())
    (job,) = (job for job in document["jobs"] if job["name"] == JOB)
    del job["data"]["eval"]
    job |= {"max_steps": STEPS, "portion_tokens": 60, "lora": job["lora"] | {"dropout": 0.1}}
    document["run"] |= {"deterministic": True, "checkpoint_every_steps": 2}
    path.write_text(json.dumps(document | {"jobs": [job]}))
    out = path.parent / "alone"
    out.mkdir()
    run_cases(2, cases(path, out, 256), out / "cases.json")
    return path, {name: digest(out / name) for name in LAYOUTS}


def cases(
    config: Path, out: Path, micro_batch_tokens: int, stop: tuple[str, int] | None = None
) -> list[dict[str, Any]]:
    size = f"run.micro_batch_tokens={micro_batch_tokens}"
    return [entry(config, out / name, [*own, size], stop=stop) for name, own in LAYOUTS.items()]


def digest(run: Path) -> str:
    adapter = (run / "jobs" / JOB / "adapter" / "adapter_model.safetensors").read_bytes()
    found = losses(run, JOB)
    assert len(found) == STEPS
    return hashlib.sha256(repr(found).encode() + adapter).hexdigest()


@given(company(), st.data())
@settings(
    max_examples=4 if ALL_TESTS else 1,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_company_room_and_stops_do_not_change_a_bit(
    scenario: tuple[Path, dict[str, str]], others: list[dict[str, Any]], data: st.DataObject
) -> None:
    path, alone = scenario
    document = json.loads(path.read_text())
    out = path.parent / f"mix{len(list(path.parent.glob('mix*')))}"
    out.mkdir()
    place = data.draw(st.integers(0, len(others)))
    joining = {**others[0], "name": "joining"}
    lives = (others, data.draw(st.sampled_from([others, [*others, joining], others[1:]])))
    stop = (JOB, data.draw(st.integers(1, STEPS - 1)))
    tokens = data.draw(st.sampled_from([128, 256, 400]))
    work = []
    for number, beside in enumerate(lives):
        mixed = document | {"jobs": [*beside[:place], *document["jobs"], *beside[place:]]}
        config = path.with_name(f"{out.name}.{number}.json")
        config.write_text(json.dumps(mixed))
        work += cases(config, out, tokens, stop if number == 0 else None)
    run_cases(2, work, out / "cases.json")
    assert {name: digest(out / name) for name in LAYOUTS} == alone
