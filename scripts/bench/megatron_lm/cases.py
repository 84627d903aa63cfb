"""The layouts of Megatron-LM that are run, and how each is started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.bench.harness.arguments import REPO
from scripts.bench.harness.processes import MEGATRON_WORKER, megatron_environment, torchrun
from scripts.bench.harness.rows import write_rows
from tests.helpers.megatron_lm import COMMON, RUNNER, SIZES, model_flags, words
from tests.helpers.scenario import largest_loss_error, losses

Precision = Literal["fp32", "bf16", "fp8", "fp8 blockwise", "fp8 delayed"]

_FP8_LIMIT = 5e-2
LIMITS: dict[Precision, float] = {
    "fp32": 3e-6, "bf16": 1e-2, "fp8": _FP8_LIMIT, "fp8 blockwise": _FP8_LIMIT,
    "fp8 delayed": _FP8_LIMIT,
}  # fmt: skip
"""Largest relative error of a training loss beside the fp32 oracle. bf16 and FP8 are the base's.

On H200s 3.0e-7, 3.9e-3 and 3.7e-2 were seen (results/megatron_lm_layouts.csv). An adapter that
never steps is off by 0.07 to 0.44, by job."""

_WITHOUT_APEX = words("--no-masked-softmax-fusion --no-gradient-accumulation-fusion")
_LOCAL = words(
    "--transformer-impl local --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm"
)
_TE = words("--transformer-impl transformer_engine --no-bias-swiglu-fusion")
_PRECISION: dict[Precision, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp8": words("--bf16 --fp8-format hybrid --fp8-recipe tensorwise"),
    "fp8 blockwise": words("--bf16 --fp8-format e4m3 --fp8-recipe blockwise"),
    "fp8 delayed": words("--bf16 --fp8-format hybrid --fp8-recipe delayed"),
}

_TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP2 = "--pipeline-model-parallel-size 2"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_USERBUFFERS = f"{_TP2_SP} --tp-comm-overlap"
_RS_DGRAD = (
    f"--tp-comm-overlap-rs-dgrad --tp-comm-overlap-cfg {REPO}/configs/megatron/userbuffers.yaml"
)
_NANO = "nano-batches run staggered"
_BY_MODULES = "tp_comm_overlap is True"
_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One run of the training script over the four jobs."""

    name: str
    world: int = 1
    """Processes, one a GPU."""
    precision: Precision = "fp32"
    """Precision of the frozen base."""
    transformer_engine: bool = False
    flags: str = ""
    nano: int = 1
    """Most nano-batches of a micro-batch."""
    says: str = ""
    """Words that the log must have, so that it ran as it should."""
    refusal: str = ""
    """The run must fail and say this; empty: it must train."""

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "_").replace("+", "_")


_BF16_SP: dict[str, Any] = {"world": 2, "precision": "bf16", "flags": _TP2_SP}
_TE_SP = _BF16_SP | {"transformer_engine": True}
_TE_ALONE: dict[str, Any] = {"transformer_engine": True}
LAYOUTS = (
    Layout(
        name="local TP2 DP2 distributed optimizer",
        world=4,
        flags=f"--tensor-model-parallel-size 2 {_DISTRIBUTED} --global-batch-size 4",
    ),
    Layout(name="local TP2+SP", world=2, flags=_TP2_SP),
    Layout(name="local PP2 full recompute", world=2, flags=f"{_PP2} {_FULL}"),
    Layout(name="TE TP2+SP bf16", **_TE_SP),
    Layout(name="TE TP2+SP bf16 nano", **_TE_SP, nano=2, says=_NANO),
    Layout(name="TE TP2+SP bf16 userbuffers", **_TE_SP | {"flags": _USERBUFFERS}, says=_BY_MODULES),
    Layout(
        name="TE TP2+SP bf16 userbuffers rs-dgrad",
        **_TE_SP | {"flags": f"{_USERBUFFERS} {_RS_DGRAD}"},
        says=_BY_MODULES,
    ),
    Layout(name="TE PP2 FP8", **_TE_SP | {"precision": "fp8", "flags": _PP2}),
    Layout(name="TE TP2+SP FP8", **_TE_SP | {"precision": "fp8"}),
    Layout(name="TE TP2+SP FP8 blockwise", **_TE_SP | {"precision": "fp8 blockwise"}),
    Layout(name="TE FP8 blockwise", precision="fp8 blockwise", **_TE_ALONE),
    Layout(name="TE FP8 delayed", precision="fp8 delayed", **_TE_ALONE),
    Layout(name="TE bf16", precision="bf16", **_TE_ALONE),
    Layout(name="TE FP8", precision="fp8", **_TE_ALONE),
    Layout(name="local bf16", precision="bf16"),
    Layout(name="local TP2+SP bf16", **_BF16_SP),
    Layout(name="local TP2+SP bf16 nano", **_BF16_SP, nano=2, says=_NANO),
    Layout(
        name="TE strict load",
        precision="bf16",
        **_TE_ALONE,
        flags="--qk-layernorm",
        refusal="q_layernorm.weight",
    ),
)
"""Megatron's own linears on two and four GPUs, Transformer Engine's on one and two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Folders and device that all runs on a machine share."""

    checkout: Path
    scenario: Path
    """Folder that `--prepare` wrote."""
    out: Path
    on_cpu: bool

    def command(self, layout: Layout) -> list[str]:
        """torchrun's command line; the scenario may have been moved since it was written."""
        worker = RUNNER if self.on_cpu else MEGATRON_WORKER
        sources = {
            "--tokenizer-model": self.scenario / ("tokenizer" if layout.refusal else "base"),
            "--load": self.scenario / "megatron",
            "--save": self.out / layout.folder,
            "--tlora-config": self.scenario / jobs_file(layout),
        }
        return [
            *torchrun(layout.world, worker, self.checkout / "pretrain_gpt.py"),
            *model_flags(self.scenario / "megatron"),
            *self._backend(layout),
            *(*COMMON, *SIZES, *_PRECISION[layout.precision], *layout.flags.split()),
            *(str(word) for pair in sources.items() for word in pair),
        ]

    def _backend(self, layout: Layout) -> list[str]:
        if self.on_cpu:
            return []  # what `launch --cpu` adds
        return [*_WITHOUT_APEX, *(_TE if layout.transformer_engine else _LOCAL)]

    def environment(self, devices: tuple[int, ...]) -> dict[str, str]:
        ours = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        return megatron_environment(self.checkout) | ours


def jobs_file(layout: Layout) -> str:
    """The configuration of a run: a refused one does not say which base it wants."""
    if layout.nano > 1:
        return f"jobs_nano_{layout.nano}.json"
    return "jobs_any_base.json" if layout.refusal else "jobs.json"


def write_nano_jobs(scenario: Path, layouts: Iterable[Layout]) -> None:
    """Writes the configurations that layouts in nano-batches want beside the prepared one."""
    for layout in layouts:
        if layout.nano > 1:
            document = json.loads((scenario / "jobs.json").read_text())
            document["run"]["nano_batches"] = layout.nano
            (scenario / jobs_file(layout)).write_text(json.dumps(document))


Oracle = Mapping[str, Sequence[float]]
"""Training losses of each job, one a step."""


Row = dict[str, Any]
"""One job of one layout, by the CSV's columns."""


def compare(layout: Layout, out: Path, expected: Oracle, common: Mapping[str, str]) -> list[Row]:
    """A row for each job of a run that ended well."""
    rows = []
    for job, alone in expected.items():
        trained = (out / "jobs" / job / "metrics.jsonl").is_file()
        got = losses(out, job) if trained else []
        rows.append(
            {
                "gpu": common["gpu"], "world": layout.world, "versions": common["versions"],
                "commit": common["commit"], "megatron_lm": common["megatron_lm"],
                "layout": layout.name, "precision": layout.precision, "job": job, "steps": len(got),
                "max_rel_loss_error": largest_loss_error(got, alone),
            }
        )  # fmt: skip
    return rows


def verdicts(layout: Layout, rows: Sequence[Row], expected: Oracle) -> list[str]:
    found, limit = [], LIMITS[layout.precision]
    for row in rows:
        job, num_steps, error = row["job"], len(expected[row["job"]]), row["max_rel_loss_error"]
        if row["steps"] != num_steps:
            found.append(f"{layout.name}: {job} took {row['steps']} of {num_steps} steps")
        if error > limit:
            found.append(f"{layout.name}: {job} is {error:.1e} off, at most {limit:.0e}")
    return found


def write(rows: Sequence[Row], path: Path) -> None:
    write_rows(path, [r | {"max_rel_loss_error": f"{r['max_rel_loss_error']:.2e}"} for r in rows])
