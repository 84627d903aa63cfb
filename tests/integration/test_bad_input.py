"""What can be wrong with the input ends `tlora train` with one sentence and exit code 2.

A few of each kind, end to end; the unit tests of configuration, data and formats hold the rest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.scenario import summary_of, take_fingerprint
from tests.helpers.tiny_models import make_tiny_model, random_factors
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.cli.main import main
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.formats.peft import export_adapter

LORA = LoraSpec(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))
ROW = json.dumps({"prompt": "ab", "completion": "cd"})


class Outcome(NamedTuple):
    """The outcome of a run."""

    code: int
    err: str
    output_dir: Path
    was_there: bool
    """The output folder was there before."""

    @property
    def jobs(self) -> dict[str, Any]:
        return summary_of(self.output_dir)["jobs"]


Train = Callable[..., Outcome]


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, data, an adapter, and spoilt ones beside them."""
    folder = tmp_path_factory.mktemp("inputs")
    base = make_tiny_model(folder / "base", "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    save_tiny_tokenizer(base)
    spec = read_model_spec(base / "config.json")
    export_adapter(
        folder / "adapter",
        lora=LORA,
        factors=random_factors(spec, LORA),
        model=spec,
        base_model=str(base),
    )
    (folder / "good.jsonl").write_text(f"{ROW}\n" * 4)
    (folder / "long.jsonl").write_text(
        "\n".join([ROW, json.dumps({"text": "x" * 60}), json.dumps({"text": "y" * 70})])
    )
    (folder / "longer.jsonl").write_text(json.dumps({"text": "z" * 300}))
    return folder


@pytest.fixture
def train(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs `tlora train` in this process on jobs that are right but for what is given."""

    def run(*jobs: dict[str, Any], overrides: Sequence[str] = ()) -> Outcome:
        document = {
            "base_model": {"path": str(inputs / "base"), "dtype": "float32"},
            "run": {"micro_batch_tokens": 128, "tensorboard": False},
            "defaults": {
                "data": {"train": str(inputs / "good.jsonl")},
                "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]},
                "batch_size": 2,
                "max_seq_len": 64,
                "max_steps": 2,
            },
            "jobs": [{"name": f"job{index}", **job} for index, job in enumerate(jobs or ({},))],
        }
        config = tmp_path / "config.json"
        config.write_text(json.dumps(document))
        out = tmp_path / "out"
        was_there = out.exists()
        arguments = [f"--set={override}" for override in overrides]
        code = main(["train", str(config), f"--set=run.output_dir={out}", *arguments])
        return Outcome(code, capsys.readouterr().err, out, was_there)

    return run


def assert_refused(outcome: Outcome, *sentences: str) -> None:
    """Exit code 2, the sentence as the error, and nothing trained or written."""
    assert outcome.code == 2
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    for sentence in sentences:
        assert sentence in errors[0]
    assert outcome.output_dir.exists() == outcome.was_there
    assert not (outcome.output_dir / "config.json").exists()
    assert not (outcome.output_dir / "jobs").exists()


REFUSED: dict[str, tuple[list[dict[str, Any]], list[str], list[str]]] = {
    "a sequence beyond the micro-batch": (
        [{"data": {"train": "{inputs}/long.jsonl"}}],
        ["run.micro_batch_tokens=60", "jobs.job0.max_seq_len=99"],
        ["run.micro_batch_tokens must be at least 70, the longest sequence of job 'job0', got"],
    ),
    "a sequence beyond the model's positions": (
        [{"data": {"train": "{inputs}/longer.jsonl"}, "max_seq_len": 400}],
        ["run.micro_batch_tokens=400"],
        ["max_seq_len of job 'job0' must be at most the model's 256 positions, got "],
    ),
    "a warm-up beyond the epochs": (
        [{"max_steps": None, "epochs": 1, "schedule": {"warmup_steps": 9}}],
        [],
        ["schedule.warmup_steps of job 'job0' must be below its", "steps, got 9"],
    ),
}
"""Jobs, which are right but for what is given, overrides, and what the sentence holds."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained(case: str, train: Train, inputs: Path) -> None:
    jobs, overrides, sentences = json.loads(
        json.dumps(REFUSED[case]).replace("{inputs}", str(inputs))
    )
    assert_refused(train(*jobs, overrides=overrides), *sentences)


def test_sizes_that_do_not_divide(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes themselves are never started."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    sentence = "world size must be a multiple of tp_size * pp_size * cp_size = 2, got 3"
    assert_refused(train(overrides=["parallel.tp_size=2"]), sentence)


def test_an_adapter_of_a_base_of_another_name_is_warned_about(
    train: Train, inputs: Path, tmp_path: Path
) -> None:
    adapter = Path(shutil.copytree(inputs / "adapter", tmp_path / "adapter"))
    change_json(adapter / "adapter_config.json", base_model_name_or_path="somebody/Other-1B")
    outcome = train({"init_from": str(adapter)}, {"init_from": str(inputs / "adapter")})
    assert outcome.code == 0
    assert f"job job0: init_from {adapter} was trained on somebody/Other-1B" in outcome.err
    assert "job job1: init_from" not in outcome.err


def test_a_base_that_is_another_model(train: Train, inputs: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(inputs / "base", tmp_path / "base"))
    take_fingerprint(base)
    change_json(base / "config.json", rms_norm_eps=1e-3)
    sentence = f"the model must give the text of {base}/base_fingerprint.json"
    assert_refused(train(overrides=[f"base_model.path={base}"]), sentence)


BAD = [
    ({"lora": {"rank": 0}}, "job1", "jobs[1].lora.rank must be at least 1, got 0"),
    (
        {"data": {"overlong": "error"}, "max_seq_len": 2},
        "job1",
        "a sequence must have at most max_seq_len 2 tokens, got ",
    ),
    ({"name": "a/b"}, "jobs[1]", "jobs[1].name must be at most 128 of A-Z a-z 0-9 . _ -"),
]
"""Found while the configuration is read; only when the job is prepared; without a name."""


@pytest.mark.parametrize(("bad", "name", "sentence"), BAD)
def test_a_job_that_cannot_start_beside_one_that_can(
    bad: dict[str, Any], name: str, sentence: str, train: Train
) -> None:
    assert_refused(train({}, bad), sentence)
    outcome = train({}, bad, {}, overrides=["run.on_job_error=skip"])
    assert outcome.code == 1
    jobs = outcome.jobs
    assert {key: job["status"] for key, job in jobs.items()} == {
        "job0": "finished",
        name: "rejected",
        "job2": "finished",
    }
    assert jobs[name]["reason"].startswith(sentence)
    assert f"job {name} is left out: {sentence}" in outcome.err
    assert (outcome.output_dir / "jobs" / "job2" / "adapter").is_dir()
    assert {path.name for path in (outcome.output_dir / "jobs").iterdir()} == {"job0", "job2"}
