"""Adapters leave for PEFT and come back: what PEFT computes with them is what was trained.

Four jobs, two of them with Megatron's fused targets, are trained in one process and in two layouts
of two; every exported adapter is loaded by `peft.PeftModel` on the Hugging Face base.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.helpers.scenario import losses, summary_of
from tests.helpers.scenario_worlds import entry, run_cases
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tests.helpers.train_worker import train_until
from tlora_megatron.config.load import load_config
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.training.data.job_data import BatchPlan, JobData, load_job_data
from tlora_megatron.training.data.tokenize import TokenSequence, load_tokenizer

TARGETS: dict[str, list[str]] = {
    "separate": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "fused_in": ["linear_qkv", "linear_fc1"],
    "fused_out": ["linear_proj", "linear_fc2", "linear_qkv"],
}
LORA: dict[str, dict[str, Any]] = {
    "separate": {"rank": 5, "alpha": 7.5, "dropout": 0.1},
    "all": {"rank": 8, "alpha": 16, "use_rslora": True},
    "fused_in": {"rank": 6, "alpha": 12},
    "fused_out": {"rank": 3, "alpha": 6},
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "TP2+SP": ("parallel.tp_size=2", "parallel.sequence_parallel=true"),
    "PP2": ("parallel.pp_size=2",),
}
JOBS_AND_LAYOUTS = [(name, layout) for layout in LAYOUTS for name in TARGETS]


class Score(NamedTuple):
    """The score of a model on some sequences."""

    loss: float
    """Mean over all target tokens."""
    exact_match: float
    """Share of sequences whose every target token is the first choice."""


Load = Callable[[Path], PeftModel]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jobs that learn to say "ok"; the evaluation wants a few "no" as well."""
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny_model(root / "base", "llama", vocab_size=VOCAB_SIZE)
    save_tiny_tokenizer(base)
    _write_rows(root / "train.jsonl", ["ok"] * 12)
    _write_rows(root / "eval.jsonl", ["ok", "no", "ok", "ok", "no"])
    jobs = [
        {"name": name, "lora": {**LORA[name], "target_modules": targets}}
        for name, targets in TARGETS.items()
    ]
    path = root / "config.json"
    document = {
        "base_model": {"path": "base", "dtype": "float32"},
        "run": {"output_dir": "out", "micro_batch_tokens": 512, "tensorboard": False},
        "defaults": {
            "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
            "batch_size": 4,
            "max_seq_len": 64,
            "max_steps": 20,
            "optimizer": {"lr": 1e-2},
        },
        "jobs": jobs,
    }
    path.write_text(json.dumps(document))
    return path


def _write_rows(path: Path, completions: Sequence[str]) -> None:
    rows = (
        {"prompt": f"{'abcdefgh'[i % 8] * (2 + i)} {i}?", "completion": text}
        for i, text in enumerate(completions)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def continued(config: Path) -> Path:
    """Config of jobs that go on from the adapters of `one process`; `split` takes a fused one."""
    document = json.loads(config.read_text())
    for job in document["jobs"]:
        job["init_from"] = f"one process/jobs/{job['name']}/adapter"
    fused = document["jobs"][-2]
    parts = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    document["jobs"].append({**fused, "name": "split", "lora": {**fused["lora"]}})
    document["jobs"][-1]["lora"]["target_modules"] = parts
    document["jobs"][0]["lora"]["dropout"] = 0.0
    document["defaults"]["max_steps"] = 2
    path = config.with_name("continued.json")
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def outputs(config: Path, continued: Path) -> Path:
    """Folder with the output of every layout, and of `continued` in one process and in two."""
    root = config.parent
    train_until(config, root / "one process")
    train_until(continued, root / "continued in one process")
    cases = [entry(config, root / name, LAYOUTS[name]) for name in ("TP2+SP", "PP2")]
    cases.append(entry(continued, root / "continued in two", LAYOUTS["TP2+SP"]))
    run_cases(2, cases, root / "cases.json")
    return root


@pytest.fixture(scope="module")
def load(config: Path) -> Load:
    """Loads an adapter with PEFT on the Hugging Face base."""

    def from_folder(adapter: Path) -> PeftModel:
        base = AutoModelForCausalLM.from_pretrained(
            config.parent / "base", dtype=torch.float32, attn_implementation="eager"
        )
        return PeftModel.from_pretrained(base, adapter).eval()

    return from_folder


def data_of(config: Path, name: str) -> JobData:
    """A job's sequences; the tokens are the package's, which the tests of data check."""
    loaded = load_config(config, output_dir=str(config.parent / "unused"))
    spec = read_model_spec(config.parent / "base" / "config.json")
    job = next(job for job in loaded.jobs if job.name == name)
    return load_job_data(job, load_tokenizer(config.parent / "base"), spec.vocab_size)


def score(model: PeftModel, sequences: Sequence[TokenSequence]) -> Score:
    total, count, exact = 0.0, 0, 0
    for sequence in sequences:
        is_target = torch.as_tensor(sequence.is_target)[1:]
        tokens = torch.as_tensor(sequence.tokens).long()
        with torch.no_grad():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1][is_target]
        labels = tokens[1:][is_target]
        total += functional.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
        exact += bool((logits.argmax(-1) == labels).all())
    return Score(total / count, exact / len(sequences))


@pytest.mark.parametrize(("name", "layout"), JOBS_AND_LAYOUTS)
def test_peft_scores_as_the_run_did(
    name: str, layout: str, outputs: Path, config: Path, load: Load
) -> None:
    reported = summary_of(outputs / layout)["jobs"][name]
    found = score(load(Path(reported["adapter"])), data_of(config, name).eval)
    assert found.loss == pytest.approx(reported["eval_loss_after"], rel=1e-5)
    assert found.exact_match == reported["exact_match_after"]
    # What was learnt is "ok": a score that the base has, or a perfect one, would prove little.
    assert reported["eval_loss_before"] > 1.5 * reported["eval_loss_after"]
    assert reported["exact_match_before"] == 0.0
    assert reported["exact_match_after"] == 0.6


@pytest.mark.parametrize("output", ["continued in one process", "continued in two"])
@pytest.mark.parametrize("name", [*TARGETS, "split"])
def test_init_from_goes_on_from_the_adapter(
    name: str, output: str, outputs: Path, continued: Path, load: Load
) -> None:
    origin = "fused_in" if name == "split" else name
    model = load(outputs / "one process" / "jobs" / origin / "adapter")
    job = next(j for j in load_config(continued).jobs if j.name == name)
    data = data_of(continued, name)
    first = [data.train[i] for i in BatchPlan.for_job(job, len(data.train)).indices(0)]
    assert losses(outputs / output, name)[0] == pytest.approx(score(model, first).loss, rel=1e-5)
    before = summary_of(outputs / output)["jobs"][name]["eval_loss_before"]
    after = summary_of(outputs / "one process")["jobs"][origin]["eval_loss_after"]
    assert before == pytest.approx(after, rel=1e-5)
