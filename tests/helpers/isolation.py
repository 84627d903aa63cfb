"""Variants of the losslessness scenario: other company, other layouts, jobs gone wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.helpers.scenario import JOBS, make_scenario
from tests.helpers.session import ALL_TESTS
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.slab import factor_names, factor_shape
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.formats.peft import export_adapter

NAMES = tuple(job["name"] for job in JOBS)
NUM_STEPS = 10
DROPOUT = {"attention": 0.1, "mlp": 0.3, "everything": 0.2, "outputs": 0.1}

Case = Mapping[str, Any]
"""`jobs`: names in order, all by default; `changes`: by job; the rest: sections of the config."""


class Incident(NamedTuple):
    job: str
    change: dict[str, Any]
    steps: int
    """That the job takes; below `NUM_STEPS` it fails at the last of them."""
    bad_steps: int
    """Number of these that are not finite."""
    run: Mapping[str, Any] = {}

    @property
    def never_moves(self) -> bool:
        return self.bad_steps == NUM_STEPS

    @property
    def fails(self) -> bool:
        """True if it ends before its time, or without having been trained."""
        return self.steps < NUM_STEPS or self.never_moves

    def case(self, **sections: Any) -> Case:
        return {"changes": {self.job: self.change}, "run": self.run, **sections}


def _bad_lr(**change: Any) -> dict[str, Any]:
    # Its warm-up makes the rates of the first three updates 0, 5e29, 1e30: step 3 is the first to
    # go wrong.
    return {"optimizer": {"lr": 1e30}, **change}


def _poison(job: str, **change: Any) -> dict[str, Any]:
    return {"init_from": f"poison/{job}", **change}


INCIDENTS = {
    "bad lr, skip": Incident("everything", _bad_lr(on_nonfinite="skip"), NUM_STEPS, NUM_STEPS - 2),
    "bad lr, fail": Incident("everything", _bad_lr(on_nonfinite="fail"), 3, 1),
    "bad lr, three in a row": Incident("everything", _bad_lr(), 5, 3, {"max_nonfinite_steps": 3}),
    "poisoned, skip": Incident("outputs", _poison("outputs", on_nonfinite="skip"), NUM_STEPS,
     NUM_STEPS, {"max_nonfinite_steps": NUM_STEPS + 1, "checkpoint_every_steps": NUM_STEPS - 1}),
    "poisoned, fail": Incident("outputs", _poison("outputs", on_nonfinite="fail"), 1, 1),
    "first poisoned, fail": Incident("attention", _poison("attention", on_nonfinite="fail"), 1, 1),
}  # fmt: skip
"""One process sees all of them."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp_size": 2},
    "TP2+SP": {"tp_size": 2, "sequence_parallel": True},
    "PP2": {"pp_size": 2},
    "CP2": {"cp_size": 2},
    "DP2": {},
}
INCIDENTS_OF: dict[str, tuple[str, ...]] = {
    "TP2": ("bad lr, fail",),
    "TP2+SP": ("poisoned, skip",),
    "PP2": ("first poisoned, fail", *(("bad lr, fail",) if ALL_TESTS else ())),
    "CP2": ("poisoned, skip", *(("first poisoned, fail",) if ALL_TESTS else ())),
    "DP2": ("bad lr, fail", *(("first poisoned, fail",) if ALL_TESTS else ())),
}
"""Incidents in two processes, by layout; there is one of `NANO_RUNS`, too."""
IN_NANO_BATCHES = ("TP2", "TP2+SP") if ALL_TESTS else ("TP2+SP",)

NANO_INCIDENT = "first poisoned, fail"
"""Its job leaves in the first step; its sequences are placeholders from then on."""
_IN_THREE: Mapping[str, Any] = {"nano_batches": 3}
NANO_RUNS: dict[str, Case] = {
    "together in 3": {"run": _IN_THREE},
    f"{NANO_INCIDENT} in 3": {**INCIDENTS[NANO_INCIDENT].case(), "run": _IN_THREE},
}
"""Runs that the layouts `IN_NANO_BATCHES` have, too."""

GROUPINGS: dict[str, Case] = {
    **{f"{name} alone": {"jobs": (name,)} for name in NAMES},
    "subset": {"jobs": ("mlp", "outputs")},
    "reversed": {"jobs": NAMES[::-1]},
    "small micro-batches": {"run": {"micro_batch_tokens": 104}},
    "one micro-batch": {"run": {"micro_batch_tokens": 4096}},
}
_DRY: Mapping[str, Any] = {"lora": {"dropout": 0.0}}
UNEVEN: Case = {
    "changes": {"attention": _DRY, "mlp": {**_DRY, "max_steps": 4},
     "everything": {**_DRY, "max_steps": None, "epochs": 2}, "outputs": _DRY},
    "run": {"micro_batch_tokens": 104},
}  # fmt: skip
"""Micro-batches of hardly more than one long sequence; one job with epochs; no dropout, so that
the oracle can follow."""

EVALUATED: dict[str, Case] = {
    f"evaluated {how}": {
        "jobs": jobs,
        "changes": {name: {"max_steps": 3, "data": {"eval": f"{name}.jsonl"}} for name in jobs},
    }
    for how, jobs in {"alone": ("everything",), "beside another": ("outputs", "everything")}.items()
}
"""Runs of which the first evaluation counts, on many rows."""

CASES: dict[int, dict[str, Case]] = {
    1: {"together": {}, **GROUPINGS, "no dropout": {"changes": dict.fromkeys(NAMES, _DRY)},
     **{name: incident.case() for name, incident in INCIDENTS.items()}, "uneven": UNEVEN,
     "bf16": {**UNEVEN, "base_model": {"dtype": "bfloat16"}}},
    2: {f"{layout} {name}": {**case, "parallel": parallel} for layout,
     parallel in LAYOUTS.items() for name,
     case in {"together": {}, **{name: INCIDENTS[name].case() for name in INCIDENTS_OF[layout]},
      **(NANO_RUNS if layout in IN_NANO_BATCHES else {}),
      **(EVALUATED if "cp_size" in parallel else {})}.items()},
}  # fmt: skip
"""By world size."""


def make_cases(root: Path) -> None:
    """Writes the scenario with dropout, the poisoned adapters, and `CASE.json` of each case."""
    document = json.loads(make_scenario(root, num_steps=NUM_STEPS, dropout=DROPOUT).read_text())
    for job in document["jobs"]:
        _write_poison(root, job)
    for cases in CASES.values():
        for name, case in cases.items():
            (root / f"{name}.json").write_text(json.dumps(_variant(document, case)))


def _variant(document: Mapping[str, Any], case: Case) -> dict[str, Any]:
    jobs = {job["name"]: job for job in document["jobs"]}
    changes = case.get("changes", {})
    sections = {key: value for key, value in case.items() if key not in ("jobs", "changes")}
    chosen = [_merged(jobs[name], changes.get(name, {})) for name in case.get("jobs", NAMES)]
    return {**_merged(document, sections), "jobs": chosen}


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A document with another one laid over it; None takes a key out."""
    result = dict(old)
    for key, value in new.items():
        result[key] = _merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return {key: value for key, value in result.items() if value is not None}


def _write_poison(root: Path, job: Mapping[str, Any]) -> None:
    """An adapter for the job whose values are finite, but no product of them is."""
    settings = job["lora"]
    lora = LoraSpec(**{**settings, "target_modules": tuple(settings.get("target_modules", ()))})
    if not lora.target_modules:
        return
    model = read_model_spec(root / "base" / "config.json")
    shapes = {name: factor_shape(model, name, lora) for name in factor_names(model, lora)}
    export_adapter(
        root / "poison" / job["name"],
        lora=lora,
        factors={name: torch.full(shape, 1e38) for name, shape in shapes.items()},
        model=model,
        base_model="base",
    )
