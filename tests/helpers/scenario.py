"""Four uneven jobs over a tiny base model: what the losslessness tests train."""

from __future__ import annotations

import functools
import json
import math
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.bench.harness.rows import append_rows, checkout_commit
from tests.helpers.fake_quant_peft import FakeQuant
from tests.helpers.oracle import OracleResult, assert_equals_alone, cached_train_alone
from tests.helpers.tiny_models import TinyModelType, make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import load_config
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.layers.slab import factor_names, initial_factor
from tlora_megatron.model.backbone import LinearsSpec, over_base
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.data.job_data import BatchPlan, load_job_data
from tlora_megatron.training.data.tokenize import load_tokenizer
from tlora_megatron.training.formats.fingerprint import make_fingerprint, write_fingerprint
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, weight_source
from tlora_megatron.training.formats.peft import load_adapter
from tlora_megatron.training.metrics import read_metrics

NUM_STEPS = 6
"""Warm-up, the whole of every schedule, and more than an epoch of the two larger jobs."""

JOBS: tuple[dict[str, Any], ...] = (
    {"name": "attention", "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]},
     "batch_size": 1, "optimizer": {"lr": 4e-3, "max_grad_norm": 0.5, "weight_decay": 0.1},
     "schedule": {"name": "constant"}},
    {"name": "mlp",
     "lora": {"rank": 6, "alpha": 9, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
     "batch_size": 2, "optimizer": {"lr": 2e-3, "max_grad_norm": 1.0, "weight_decay": 0.01},
     "schedule": {"name": "linear", "warmup_steps": 3}},
    {"name": "everything", "lora": {"rank": 8, "alpha": 16, "use_rslora": True}, "batch_size": 5,
     "optimizer": {"lr": 1e-3, "max_grad_norm": 0.3},
     "schedule": {"name": "cosine", "warmup_steps": 2, "min_lr": 1e-4}, "seed": 7},
    {"name": "outputs",
     "lora": {"rank": 16, "alpha": 16, "target_modules": ["k_proj", "o_proj", "down_proj"]},
     "batch_size": 8, "optimizer": {"lr": 2e-3, "max_grad_norm": 0.0, "betas": [0.8, 0.95]},
     "schedule": {"name": "cosine"}},
)  # fmt: skip

_SENTENCE = "the quick brown fox jumps over a lazy dog while seven wizards bake round bread"
_WORDS = _SENTENCE.split()


def make_scenario(
    root: Path,
    specs: Sequence[Mapping[str, Any]] = JOBS,
    *,
    num_steps: int = NUM_STEPS,
    num_layers: int = 2,
    model_type: TinyModelType = "llama",
    dropout: Mapping[str, float] = {},
    run: Mapping[str, Any] = {},
    **base: Any,
) -> Path:
    """Writes the base model, the jobs' data and `config.json`; returns the config's path.

    Args:
        dropout: of the jobs with these names.
        run: more of that section.
        **base: as `make_tiny_model` takes it.
    """
    make_tiny_model(
        root / "base", model_type, vocab_size=VOCAB_SIZE, num_hidden_layers=num_layers, **base
    )
    save_tiny_tokenizer(root / "base")
    jobs = []
    for index, job in enumerate(specs):
        write_rows(root / f"{job['name']}.jsonl", 18, seed=index)
        write_rows(root / f"{job['name']}.eval.jsonl", 3, seed=100 + index)
        data = {"train": f"{job['name']}.jsonl", "eval": f"{job['name']}.eval.jsonl"}
        own = {"data": data, "max_steps": num_steps, "max_seq_len": 100}
        if job["name"] in dropout:
            own["lora"] = {**job["lora"], "dropout": dropout[job["name"]]}
        jobs.append({**job, **own})
    config = {
        "base_model": {"path": "base", "dtype": "float32"},
        "run": {"output_dir": "out", "micro_batch_tokens": 256, "tensorboard": False, **run},
        "jobs": jobs,
    }
    path = root / "config.json"
    path.write_text(json.dumps(config))
    return path


def take_fingerprint(base: Path) -> None:
    spec, cpu = read_model_spec(base / "config.json"), torch.device("cpu")
    source = weight_source(spec, HFCheckpoint(base), cpu)
    fingerprint = make_fingerprint(spec, source, dtype=torch.float32, device=cpu)
    write_fingerprint(base, fingerprint)


def write_rows(path: Path, count: int, *, seed: int) -> None:
    """Made-up prompts and completions of skewed lengths, a few of them several times the median."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        size = min(12, 1 + int(draw.paretovariate(1.2)))
        words = draw.choices(_WORDS, k=size)
        prompt = " ".join(words) + "?"
        lines.append(json.dumps({"prompt": prompt, "completion": " ".join(words[::-1])}))
    path.write_text("\n".join(lines) + "\n")


def oracle_results(
    config: RunConfig, quantised: FakeQuant | None = None
) -> dict[str, OracleResult]:
    """Each job alone under transformers and PEFT, with the same data order and initial adapter."""
    base = Path(str(config.base_model.path))
    spec = read_model_spec(base / "config.json")
    return {job.name: job_alone(base, over_base(job, spec), spec, quantised) for job in config.jobs}


def job_alone(
    base: Path, job: JobSpec, spec: LinearsSpec, quantised: FakeQuant | None = None
) -> OracleResult:
    data = load_job_data(job, load_tokenizer(base), spec.vocab_size)
    plan = BatchPlan.for_job(job, len(data.train))
    batches = [[data.train[i] for i in plan.indices(step)] for step in range(plan.num_steps)]
    factors = {n: initial_factor(spec, n, job.lora, job.seed) for n in factor_names(spec, job.lora)}
    return cached_train_alone(base, job, factors, batches, quantised)


@functools.cache
def oracle_of(scenario: Path) -> dict[str, OracleResult]:
    return oracle_results(load_config(scenario))


def only_job(scenario: Path, name: str) -> Path:
    document = json.loads(scenario.read_text())
    document["jobs"] = [job for job in document["jobs"] if job["name"] == name]
    path = scenario.parent / f"{name} alone.json"
    path.write_text(json.dumps(document))
    return path


def load_scenario(path: Path, *overrides: str, output_dir: Path) -> RunConfig:
    return load_config(path, overrides, str(output_dir))


def losses(output_dir: Path, name: str) -> list[float]:
    records = read_metrics(output_dir / "jobs" / name / "metrics.jsonl")
    return [r["loss"] for r in records if "loss" in r]


def largest_loss_error(got: Sequence[float], alone: Sequence[float]) -> float:
    """Relative to the oracle's losses; infinite where there is none, or one that is no number."""
    errors = [abs(a - b) / abs(b) for a, b in zip(got, alone, strict=False)]
    return max((e if math.isfinite(e) else math.inf for e in errors), default=math.inf)


def exported(output_dir: Path, name: str, base: Path) -> Mapping[str, torch.Tensor]:
    spec = read_model_spec(base / "config.json")
    return load_adapter(output_dir / "jobs" / name / "adapter", model=spec).factors


def records(output_dir: Path, name: str) -> list[dict[str, Any]]:
    """A job's metrics, training and evaluation, without the times."""
    lines = read_metrics(output_dir / "jobs" / name / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "time_s"} for line in lines]


def summary_of(output_dir: Path) -> dict[str, Any]:
    return json.loads((output_dir / "summary.json").read_text())


def adapter_tensors(output_dir: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(output_dir / "jobs" / name / "adapter" / "adapter_model.safetensors")


def have_same_adapters(run: Path, other: Path, name: str) -> bool:
    mine, theirs = adapter_tensors(run, name), adapter_tensors(other, name)
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[key], value) for key, value in theirs.items())


def assert_same_bits(run: Path, other: Path, name: str) -> None:
    assert records(run, name) == records(other, name), name
    assert have_same_adapters(run, other, name), name


def assert_equals_oracle(output_dir: Path, name: str, expected: OracleResult, base: Path) -> None:
    assert len(expected.losses) >= NUM_STEPS
    factors = exported(output_dir, name, base)
    assert_equals_alone(losses(output_dir, name), factors, expected, f"{output_dir.name}: {name}")


def assert_run_equals_oracle(
    output_dir: Path,
    names: Iterable[str],
    scenario: Path,
    expected: Mapping[str, OracleResult] | None = None,
) -> None:
    """A run's jobs have the losses and exported adapters that they get alone.

    How far the losses are off goes to the file that $TLORA_LOSS_ROWS names: the README's figure.

    Args:
        expected: by name; None = those of the jobs in the scenario's file.
    """
    for name in names:
        alone = (expected or oracle_of(scenario))[name]
        assert_equals_oracle(output_dir, name, alone, scenario.parent / "base")
        if rows := os.environ.get("TLORA_LOSS_ROWS"):
            got = losses(output_dir, name)
            row = {"commit": checkout_commit(), "device": "cpu", "case": output_dir.name}
            row |= {"job": name, "steps": len(got)}
            row |= {"max_rel_loss_error": f"{largest_loss_error(got, alone.losses):.2e}"}
            append_rows(Path(rows), [row])


def gone_wrong(name: str) -> tuple[str, ...]:
    """Overrides that make a job's weights overflow, and let it go on."""
    return (f"jobs.{name}.optimizer.lr=1e30", "run.max_nonfinite_steps=100")


def assert_unharmed(output_dir: Path, healthy: Path, ill: str, names: Iterable[str]) -> None:
    """Beside a job gone wrong, all others have the records and factors of a healthy run."""
    assert summary_of(output_dir)["jobs"][ill]["skipped_steps"] > 0
    for name in set(names) - {ill}:
        assert_same_bits(output_dir, healthy, name)
