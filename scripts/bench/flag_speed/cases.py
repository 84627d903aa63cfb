"""The cases of the benchmark, and the command that starts each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.around_training.base import shape_of, write_config
from scripts.bench.harness.arguments import REPO
from scripts.bench.harness.processes import (
    ITERATION,
    MEGATRON_WORKER,
    megatron_environment,
    torchrun,
)
from scripts.bench.step.jobs import ATTENTION, RANKS
from tlora_megatron.config.job import MEGATRON_TARGETS
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.megatron_flags import megatron_flags

IMPLS = {
    "local": "--transformer-impl local --no-persist-layer-norm",
    "local_unfused": "--transformer-impl local --no-persist-layer-norm --no-bias-swiglu-fusion "
    "--no-rope-fusion",
    "transformer_engine": "--transformer-impl transformer_engine",
    "transformer_engine_unfused": "--transformer-impl transformer_engine --no-bias-swiglu-fusion",
}
"""Builders of the base; unfused: SwiGLU (and rotation) as torch's own kernels."""
PRECISIONS = {
    "bf16": "--bf16",
    "fp8": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp8_blockwise": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "fp32": "",
}
MODELS = {"8b": "8b", "six_layers": "six layers", "toy": "toy"}
ONE_JOB = "one"
JOBS = ("eight", ONE_JOB)
STOCK = ("stock_peft", "stock_fused_loss", "stock_op_fuser", "stock_in_turn")
"""Modes that train one adapter as Megatron-Bridge does, see `stock.py`."""
ONE_LORA = {"rank": 16, "alpha": 32, "target_modules": MEGATRON_TARGETS}
"""The one job's adapter: Megatron-Bridge's, parameter by parameter."""
_USERBUFFERS = "--tp-comm-overlap --tp-comm-bootstrap-backend nccl"
USERBUFFERS = {
    "userbuffers": _USERBUFFERS,
    "userbuffers rs-dgrad": f"{_USERBUFFERS} --tp-comm-overlap-rs-dgrad "
    f"--tp-comm-overlap-cfg {REPO}/configs/megatron/userbuffers.yaml",
}
"""Flags of what Transformer Engine's userbuffers overlap.

By default the linears that a norm begins overlap the gathering of their input, the others both the
sum of their output and the gathering of its gradient. With `rs-dgrad` the sum of the gradient of
the former's input comes in addition."""
_COMMON = (
    "--micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --eval-interval 100 --eval-iters 0 "
    "--num-workers 0 --seed 1 --mock-data --no-create-attention-mask-in-dataloader "
    "--save-interval 1000000"
)
TEXTS = REPO / "configs" / "quickstart" / "data"
WARMUP = 3
"""Iterations of a mode before those that count, in each turn."""
_RECORDS = 48
"""Records of a job's data, which is repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One life of the script."""

    impl: str
    precision: str
    model: str
    layers: int | None
    tp: int
    tokens: int
    rounds: int
    turns: int
    commit: str
    kernels: Path | None
    modes: tuple[str, ...]
    sequence_parallel: bool = False
    nano: int = 1
    """Most nano-batches of a micro-batch."""
    userbuffers: str = ""
    """A key of `USERBUFFERS`; empty = nothing overlaps inside Transformer Engine's linears."""
    jobs: str = "eight"
    bridge: Path | None = None
    """Folder with Megatron-Bridge's `megatron` package, for the stock modes."""

    @property
    def layout(self) -> str:
        parts = [f"TP{self.tp}+SP" if self.sequence_parallel and self.tp > 1 else f"TP{self.tp}"]
        if self.nano > 1:
            parts.append(f"nano {self.nano}")
        if self.userbuffers:
            parts.append(self.userbuffers)
        if self.jobs == ONE_JOB:
            parts.append("one job")
        return " ".join(parts)

    @property
    def iterations(self) -> int:
        """The number of trainer iterations: both ways take turns, then each is profiled."""
        num_modes = 1 + ("flag_modules" in self.modes)
        return self.turns * num_modes * (WARMUP + self.rounds) + num_modes * bool(self.kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Folders and device of all lives."""

    checkout: Path
    work: Path
    on_cpu: bool

    def prepare(self, case: Case) -> tuple[Path, Path]:
        """Writes base, texts and jobs; returns the files of the rows and of the log."""
        config = shape_of(MODELS[case.model])
        config["num_hidden_layers"] = case.layers or config["num_hidden_layers"]
        write_config(config, self.work / "base")
        if case.jobs == ONE_JOB:
            write_one_job(case, self.work)
        else:
            write_jobs(case, self.spec(), self.work)
        (self.work / "case.json").write_text(json.dumps(asdict(case), default=str))
        return self.work / f"{case.impl}.json", self.work / f"{case.impl}.log"

    def command(self, case: Case) -> list[str]:
        backend = ["--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion"]
        files = {
            "--tokenizer-type": "HuggingFaceTokenizer",
            "--tokenizer-model": self.work / "base",
            "--save": self.work / f"out_{case.impl}",
            "--tlora-config": self.work / "jobs.json",
        }
        numbers = {
            "--seq-length": case.tokens,
            "--train-iters": case.iterations,
            "--log-interval": case.rounds,
        }
        return [
            *torchrun(case.tp, MEGATRON_WORKER, self.checkout / "pretrain_gpt.py"),
            *megatron_flags(self.spec()),
            *([] if self.on_cpu else [*backend, *IMPLS[case.impl].split()]),
            *_COMMON.split(),
            *("" if self.on_cpu else PRECISIONS[case.precision]).split(),
            *self._parallel(case),
            *(str(word) for pair in (*files.items(), *numbers.items()) for word in pair),
        ]

    def _parallel(self, case: Case) -> list[str]:
        if case.tp == 1:
            return []
        words = ["--tensor-model-parallel-size", str(case.tp)]
        if case.sequence_parallel:
            words.append("--sequence-parallel")
        return [*words, *USERBUFFERS.get(case.userbuffers, "").split()]

    def spec(self) -> ModelSpec:
        return read_model_spec(self.work / "base" / "config.json")

    def environment(self, case: Case, rows: Path) -> dict[str, str]:
        return megatron_environment(self.checkout) | {
            ITERATION: "scripts.bench.flag_speed.turns:begin",
            "TLORA_FLAG_CASE": str(self.work / "case.json"),
            "TLORA_FLAG_ROWS": str(rows),
        }


def write_jobs(case: Case, spec: ModelSpec, folder: Path) -> None:
    """Writes eight jobs over real texts, whose batches are larger than a micro-batch's share."""
    draw = np.random.default_rng(0)
    sources = sorted(TEXTS.glob("*_train.jsonl"))
    jobs = []
    for number, (rank, source) in enumerate(zip(RANKS, itertools.cycle(sources), strict=False)):
        texts = _texts(source, draw, longest=case.tokens // 8)
        records = [json.dumps(next(texts)) for _ in range(_RECORDS)]
        file = folder / f"job{number}.jsonl"
        file.write_text("\n".join(records) + "\n")
        rank = min(rank, spec.kv_size)
        lora: dict[str, Any] = {"rank": rank, "alpha": 2 * rank}
        if number % 3 == 2:
            lora |= {"target_modules": ATTENTION}
        jobs.append(_job(file, lora, batch_size=16, max_seq_len=max(32, case.tokens // 4), lr=1e-5))
    _write_document(jobs, folder, case.nano)


def write_one_job(case: Case, folder: Path) -> None:
    """Writes a job whose batch is one full micro-batch: eight sequences of an eighth each.

    It steps in every iteration, as a trainer of one job does.
    """
    length = case.tokens // 8
    sources = sorted(TEXTS.glob("*_train.jsonl"))
    text = "\n".join(
        record["prompt"] + record["completion"]
        for source in sources
        for record in map(json.loads, source.read_text().splitlines())
    )
    # Characters that are more than `length` tokens: every sequence is cut to as many rows.
    size, prompt = 16 * length, length // 2
    pieces = [text[i % len(text) :][:size] for i in range(0, _RECORDS * size, size)]
    pieces = [(piece + text)[:size] for piece in pieces]
    records = [{"prompt": piece[:prompt], "completion": piece[prompt:]} for piece in pieces]
    file = folder / "job0.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n")
    job = _job(file, ONE_LORA, batch_size=8, max_seq_len=length + 1, lr=1e-3)
    _write_document([job], folder, case.nano)


def _job(file: Path, lora: Mapping[str, Any], lr: float, **more: Any) -> dict[str, Any]:
    common = {"name": file.stem, "data": {"train": str(file)}, "max_steps": 10**6}
    return common | {"lora": lora, "optimizer": {"lr": lr}, **more}


def _write_document(jobs: Sequence[Mapping[str, Any]], folder: Path, nano: int) -> None:
    document = {
        "base_model": {"path": str(folder / "base"), "random_init": True},
        "run": {"tensorboard": False, "resume": "never", "nano_batches": nano},
        "jobs": jobs,
    }
    (folder / "jobs.json").write_text(json.dumps(document))


def _texts(source: Path, draw: np.random.Generator, *, longest: int) -> Iterator[dict[str, str]]:
    """Records of a file put together until they have a drawn length; half is completion."""
    lines = itertools.cycle([json.loads(line) for line in source.read_text().splitlines()])
    while True:
        # About two characters a token, of prompt and completion each.
        wanted = int(draw.integers(longest // 4, longest))
        parts: list[str] = []
        while sum(map(len, parts)) < 2 * wanted:
            record = next(lines)
            parts.append(record["prompt"] + record["completion"])
        half = len(parts) // 2
        yield {"prompt": "\n".join(parts[:half]), "completion": "\n".join(parts[half:])}


Row = Mapping[str, Any]
"""One mode of one life; the keys are the CSV's columns."""


def make_row(case: Any, mode: str, common: Mapping[str, Any], measured: Mapping[str, Any]) -> Row:
    """A mode's row, of what a life's rows share, and of its own time, tokens and peak."""
    return {
        "gpu": common["gpu"], "world": case.tp, "commit": case.commit,
        "megatron_lm": common["megatron_lm"], "impl": case.impl, "precision": case.precision,
        "layout": case.layout, "mode": mode, "rows": case.tokens, "tokens": measured["tokens"],
        "step_ms": measured["step_ms"], "floor_ms": common["floor_ms"],
        "peak_bytes": measured["peak_bytes"],
    }  # fmt: skip


def show(row: Row, rows: Sequence[Row]) -> str:
    life = {r["mode"]: r["step_ms"] for r in rows if r["impl"] == row["impl"]}
    others = {"floor": row["floor_ms"], "own": life.get("own"), "flag": life.get("flag")}
    over = "".join(f", {row['step_ms'] / ms:.3f}x {mode}" for mode, ms in others.items() if ms)
    return (
        f"{row['impl']:20} {row['layout']:16} {row['mode']:16} {row['step_ms']:8.1f} ms{over}, "
        f"{row['tokens']} tokens, {1e3 * row['tokens'] / row['step_ms']:.0f} tokens/s, "
        f"{row['peak_bytes'] / 2**30:.1f} GiB"
    )
