"""Each thing that can be wrong with the input ends `tlora train` with one sentence and exit code 2.

One end-to-end assertion each; the unit tests of configuration, data and formats hold the rest.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.scenario import take_fingerprint
from tests.helpers.tiny_models import make_tiny_model, random_factors
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.cli.main import main
from tlora_megatron.config.job import HF_TARGETS, MEGATRON_TARGETS, LoraSpec
from tlora_megatron.model.spec import read_model_spec
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
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output_dir / "summary.json").read_text())

    @property
    def jobs(self) -> dict[str, Any]:
        return self.summary["jobs"]


Train = Callable[..., Outcome]


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
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "not_json.jsonl").write_text(f'{ROW}\n{ROW}\n{{"prompt": "ab", \n')
    (folder / "no_keys.jsonl").write_text(f'{ROW}\n{{"prompt": "ab"}}\n')
    return folder


@pytest.fixture
def train(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Train:
    """Runs `tlora train` in this process on jobs that are right but for what is given."""

    def run(
        *jobs: dict[str, Any], overrides: tuple[str, ...] = (), output_dir: Path | None = None
    ) -> Outcome:
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
        out = output_dir or tmp_path / "out"
        was_there = out.exists()
        arguments = [f"--set={override}" for override in overrides]
        code = main(["train", str(config), f"--output-dir={out}", *arguments])
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


class TestData:
    """Files of a job, and what stands in them."""

    @pytest.mark.parametrize("key", ["train", "eval"])
    def test_missing_file(self, key: str, train: Train) -> None:
        outcome = train({}, {"data": {key: "nowhere.jsonl"}})
        assert_refused(
            outcome, f"jobs[1].data.{key} must be an existing file, got ", "nowhere.jsonl", "job1"
        )

    def test_empty_file(self, train: Train, inputs: Path) -> None:
        outcome = train({"data": {"train": str(inputs / "empty.jsonl")}})
        assert_refused(outcome, "jobs[0].data.train must be a file that is not empty", "job0")

    def test_file_of_blank_lines(self, train: Train, inputs: Path) -> None:
        outcome = train({"data": {"train": str(inputs / "blank.jsonl")}})
        assert_refused(outcome, "data.train must hold at least one line, got none: job 'job0'")

    def test_line_that_is_not_json(self, train: Train, inputs: Path) -> None:
        path = inputs / "not_json.jsonl"
        outcome = train({}, {"data": {"eval": str(path)}})
        assert_refused(outcome, "a line must be JSON, got ", f"job 'job1', {path} line 3")

    def test_line_without_the_keys(self, train: Train, inputs: Path) -> None:
        path = inputs / "no_keys.jsonl"
        outcome = train({"data": {"train": str(path)}})
        assert_refused(
            outcome,
            "a line must hold prompt and completion, or messages, or text, got the keys ['prompt']",
            f"job 'job0', {path} line 2",
        )

    def test_token_beyond_the_vocabulary(self, train: Train, tmp_path: Path, inputs: Path) -> None:
        small = make_tiny_model(tmp_path / "small", "llama", vocab_size=100, num_hidden_layers=2)
        save_tiny_tokenizer(small)
        outcome = train(overrides=(f"base_model.path={small}",))
        # "b" is byte 98, and a byte b is token 8 + b.
        assert_refused(
            outcome,
            "token id must be below the model's vocabulary 100, got 108: job 'job0'",
            f"{inputs / 'good.jsonl'} line 1",
        )

    def test_long_sequences_are_cut_and_counted(self, train: Train, inputs: Path) -> None:
        data = {"train": str(inputs / "long.jsonl"), "eval": str(inputs / "long.jsonl")}
        outcome = train({"data": data, "max_seq_len": 50}, {})
        assert outcome.code == 0
        assert outcome.jobs["job0"]["truncated_sequences"] == 4
        assert outcome.jobs["job0"]["dropped_sequences"] == 0
        assert outcome.jobs["job1"]["truncated_sequences"] == 0
        assert "2 of 3 sequences cut to max_seq_len 50" in outcome.err

    def test_long_sequences_are_refused_where_asked(self, train: Train, inputs: Path) -> None:
        data = {"train": str(inputs / "long.jsonl"), "overlong": "error"}
        outcome = train({"data": data, "max_seq_len": 50})
        assert_refused(
            outcome, "a sequence must have at most max_seq_len 50 tokens, got 61", "line 2"
        )

    def test_sequence_beyond_the_micro_batch(self, train: Train, inputs: Path) -> None:
        outcome = train(
            {"data": {"train": str(inputs / "long.jsonl")}},
            overrides=("run.micro_batch_tokens=60", "jobs.job0.max_seq_len=99"),
        )
        assert_refused(
            outcome,
            "run.micro_batch_tokens must be at least 70, the longest sequence of job 'job0', got",
        )

    def test_sequence_beyond_the_model_s_positions(self, train: Train, tmp_path: Path) -> None:
        (tmp_path / "longer.jsonl").write_text(json.dumps({"text": "z" * 300}))
        outcome = train(
            {"data": {"train": str(tmp_path / "longer.jsonl")}, "max_seq_len": 400},
            overrides=("run.micro_batch_tokens=400",),
        )
        assert_refused(
            outcome, "max_seq_len of job 'job0' must be at most the model's 256 positions, got "
        )


class TestJobs:
    """Names, adapters and sizes."""

    def test_rank_0(self, train: Train) -> None:
        outcome = train({}, {"lora": {"rank": 0}})
        assert_refused(outcome, "jobs[1].lora.rank must be at least 1, got 0 (job job1)")

    def test_job_whose_updates_are_all_skipped(
        self, train: Train, inputs: Path, tmp_path: Path
    ) -> None:
        """Its adapter is what it was; more steps in a row would have failed it earlier."""
        huge = Path(shutil.copytree(inputs / "adapter", tmp_path / "huge"))
        weights = load_file(huge / "adapter_model.safetensors")
        weights = {name: tensor * 1e30 for name, tensor in weights.items()}
        save_file(weights, huge / "adapter_model.safetensors")
        for _ in range(2):  # the same command again says the same
            outcome = train({"init_from": str(huge), "batch_size": 9}, {})
            assert outcome.code == 1
            job = outcome.jobs["job0"]
            assert (job["status"], job["skipped_steps"], job["adapter"]) == ("failed", 2, None)
            assert job["reason"] == (
                "none of its 2 updates could be applied, as none of its losses and gradients was "
                "finite"
            )
            assert not (outcome.output_dir / "jobs" / "job0" / "adapter").exists()
            assert outcome.jobs["job1"]["status"] == "finished"
            said = "batch_size 9 is above its 4 training sequences (steps: 2, epochs: 4.5)"
            assert f"job job0: {said}" in outcome.err

    def test_warm_up_beyond_the_epochs(self, train: Train) -> None:
        schedule = {"warmup_steps": 9}
        outcome = train({"max_steps": None, "epochs": 1, "schedule": schedule})
        assert_refused(
            outcome, "schedule.warmup_steps of job 'job0' must be below its", "steps, got 9"
        )

    def test_unknown_target(self, train: Train) -> None:
        outcome = train({"lora": {"target_modules": ["q_proj", "w_proj"]}})
        assert_refused(
            outcome,
            "jobs[0].lora.target_modules[1]",
            "'w_proj'",
            *(f"{name}" for name in HF_TARGETS + MEGATRON_TARGETS),
        )

    def test_same_name_twice(self, train: Train) -> None:
        outcome = train({"name": "twin"}, {}, {"name": "twin"})
        assert_refused(outcome, "jobs must have unique names, got 'twin' 2 times")

    @pytest.mark.parametrize("name", ["a/b", "..", ".", "a\nb", "a\x00b", "", "-rf", "å"])
    def test_name_that_is_no_folder_s(self, name: str, train: Train) -> None:
        assert_refused(train({"name": name}), "jobs[0].name must ")

    @pytest.mark.parametrize(
        ("field", "value", "sentence"),
        [
            ("rank", 8, "job 'job0': init_from adapter's rank must be the job's 8, got 4"),
            ("alpha", 4, "job 'job0': init_from adapter's scaling must be the job's 1 (alpha 4 /"),
            (
                "target_modules",
                ["q_proj"],
                "job 'job0': init_from adapter's target_modules must be the job's q_proj, got",
            ),
        ],
    )
    def test_adapter_of_another_job(
        self, field: str, value: Any, sentence: str, train: Train, inputs: Path
    ) -> None:
        lora = {"rank": 4, "alpha": 8, field: value}
        outcome = train({"init_from": str(inputs / "adapter"), "lora": lora})
        assert_refused(outcome, sentence)

    @pytest.mark.parametrize(
        ("shape", "sentence"),
        [
            ({"hidden_size": 32}, "layers.0.down_proj.lora_b must have shape [32, 4], got [64, 4]"),
            ({"num_hidden_layers": 1}, "in layers 0 to 0, got layers.1."),
            ({"num_hidden_layers": 3}, "in all 3 layers, got none for layers.2."),
        ],
    )
    def test_adapter_of_another_base(
        self, shape: dict[str, int], sentence: str, train: Train, inputs: Path, tmp_path: Path
    ) -> None:
        shape = {"num_hidden_layers": 2, **shape}
        other = make_tiny_model(tmp_path / "other", "llama", vocab_size=VOCAB_SIZE, **shape)
        save_tiny_tokenizer(other)
        outcome = train(
            {"init_from": str(inputs / "adapter")}, overrides=(f"base_model.path={other}",)
        )
        assert_refused(outcome, f"adapter {inputs / 'adapter'}: ", sentence)

    def test_adapter_that_is_not_finite(self, train: Train, inputs: Path, tmp_path: Path) -> None:
        adapter = Path(shutil.copytree(inputs / "adapter", tmp_path / "adapter"))
        weights = load_file(adapter / "adapter_model.safetensors")
        next(iter(weights.values()))[0, 0] = math.nan
        save_file(weights, adapter / "adapter_model.safetensors")
        outcome = train({"init_from": str(adapter)})
        assert_refused(outcome, "job 'job0': init_from adapter", "must be finite, got NaN or inf")

    def test_adapter_of_a_base_of_another_name_is_warned_about(
        self, train: Train, inputs: Path, tmp_path: Path
    ) -> None:
        adapter = Path(shutil.copytree(inputs / "adapter", tmp_path / "adapter"))
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "somebody/Other-1B"
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        outcome = train({"init_from": str(adapter)}, {"init_from": str(inputs / "adapter")})
        assert outcome.code == 0
        assert f"job job0: init_from {adapter} was trained on somebody/Other-1B" in outcome.err
        assert "job job1: init_from" not in outcome.err

    def test_adapter_without_weights(self, train: Train, tmp_path: Path) -> None:
        (tmp_path / "adapter").mkdir()
        outcome = train({"init_from": str(tmp_path / "adapter")})
        assert_refused(outcome, "directory must hold adapter_config.json, got none")


class TestLayout:
    """Sizes that do not divide; the processes themselves are never started."""

    @pytest.fixture(autouse=True)
    def three_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "3")

    def test_world_size(self, train: Train) -> None:
        assert_refused(
            train(overrides=("parallel.tp_size=2",)),
            "world size must be a multiple of tp_size * pp_size * cp_size = 2, got 3",
        )

    def test_heads(self, train: Train) -> None:
        assert_refused(
            train(overrides=("parallel.tp_size=3",)),
            "num_heads must be a multiple of tp_size=3, got 8",
        )

    def test_layers(self, train: Train) -> None:
        assert_refused(
            train(overrides=("parallel.pp_size=3",)),
            "num_layers must be a multiple of pp_size=3, got 2",
        )


class TestBase:
    """Weights of the base model."""

    @pytest.fixture
    def broken(self, inputs: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(inputs / "base", tmp_path / "broken"))

    def test_truncated_weights(self, train: Train, broken: Path) -> None:
        path = broken / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
        outcome = train(overrides=(f"base_model.path={broken}",))
        assert_refused(outcome, f"{path} must be a complete safetensors file, got ")

    def test_corrupt_weights(self, train: Train, broken: Path) -> None:
        path = broken / "model.safetensors"
        path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
        outcome = train(overrides=(f"base_model.path={broken}",))
        assert_refused(outcome, f"{path} must be a complete safetensors file, got ")

    def test_missing_and_misshapen_tensors(self, train: Train, broken: Path) -> None:
        path = broken / "model.safetensors"
        name = "model.layers.1.mlp.up_proj.weight"
        tensors = load_file(path)
        tensors[name] = tensors[name][:-1].contiguous()
        save_file(tensors, path)
        outcome = train(overrides=(f"base_model.path={broken}",))
        assert_refused(outcome, f"{name} must have shape [96, 64], got [95, 64]")
        del tensors[name]
        save_file(tensors, path)
        outcome = train(overrides=(f"base_model.path={broken}",))
        assert_refused(outcome, f"{broken} must hold the tensor {name}, got ")

    def test_architecture_that_is_not_supported(self, train: Train, broken: Path) -> None:
        config = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
        outcome = train(overrides=(f"base_model.path={broken}",))
        assert_refused(
            outcome,
            "model_type must be one of llama, mistral, qwen2, qwen3, qwen2_moe, qwen3_moe, mixtral",
            "got 'gpt2'",
        )

    def test_no_tokenizer(self, train: Train, tmp_path: Path) -> None:
        bare = make_tiny_model(tmp_path / "bare", "llama", num_hidden_layers=2)
        outcome = train(overrides=(f"base_model.path={bare}",))
        assert_refused(outcome, "base_model must hold a tokenizer (", f"got none in {bare}")

    def test_another_model_than_the_fingerprint_s(
        self, train: Train, inputs: Path, tmp_path: Path
    ) -> None:
        base = Path(shutil.copytree(inputs / "base", tmp_path / "checked"))
        take_fingerprint(base)
        config = json.loads((base / "config.json").read_text())
        config["rms_norm_eps"] = 1e-3
        (base / "config.json").write_text(json.dumps(config))
        outcome = train(overrides=(f"base_model.path={base}",))
        assert_refused(outcome, f"the model must give the text of {base}/base_fingerprint.json")


class TestOutput:
    """Where a run may write."""

    def test_below_a_file(self, train: Train, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        outcome = train(output_dir=tmp_path / "file" / "out")
        assert_refused(outcome, "run.output_dir must be writable, got ", "Not a directory")

    def test_folder_of_something_else(self, train: Train, tmp_path: Path) -> None:
        output_dir = tmp_path / "model"
        output_dir.mkdir()
        (output_dir / "config.json").write_text('{"model_type": "llama"}')
        outcome = train(output_dir=output_dir)
        assert outcome.code == 2
        assert (
            f"run.output_dir must be new or hold this run, got {output_dir} with a config.json "
            "that is no run's"
        ) in outcome.err
        assert [path.name for path in output_dir.iterdir()] == ["config.json"]

    def test_folder_of_another_run(self, train: Train, inputs: Path, tmp_path: Path) -> None:
        other = Path(shutil.copytree(inputs / "base", tmp_path / "other"))
        assert train().code == 0
        before = (tmp_path / "out" / "config.json").read_text()
        outcome = train(overrides=(f"base_model.path={other}",))
        assert outcome.code == 2
        assert f"run.output_dir must be new or hold this run, got {tmp_path / 'out'}" in outcome.err
        assert str(inputs / "base") in outcome.err
        assert (tmp_path / "out" / "config.json").read_text() == before


class TestOnJobError:
    """One job that cannot start, beside one that can."""

    BAD = (
        {"lora": {"rank": 0}},
        {"data": {"overlong": "error"}, "max_seq_len": 2},
        {"name": "a/b"},
    )
    """Found while the configuration is read; only when the job is prepared; without a name."""
    REASONS = (
        ("job1", "jobs[1].lora.rank must be at least 1, got 0"),
        ("job1", "a sequence must have at most max_seq_len 2 tokens, got "),
        ("jobs[1]", "jobs[1].name must be at most 128 of A-Z a-z 0-9 . _ -"),
    )

    @pytest.mark.parametrize(("bad", "reason"), list(zip(BAD, REASONS, strict=True)))
    def test_stop(self, bad: dict[str, Any], reason: tuple[str, str], train: Train) -> None:
        assert_refused(train({}, bad), reason[1])

    @pytest.mark.parametrize(("bad", "reason"), list(zip(BAD, REASONS, strict=True)))
    def test_skip(self, bad: dict[str, Any], reason: tuple[str, str], train: Train) -> None:
        name, sentence = reason
        outcome = train({}, bad, {}, overrides=("run.on_job_error=skip",))
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

    def test_skip_with_nothing_left(self, train: Train) -> None:
        bad = self.BAD[1]
        outcome = train(bad, bad, overrides=("run.on_job_error=skip",))
        assert_refused(
            outcome,
            "jobs must hold at least one that can start, got a sequence must have at most max_seq",
            "; a sequence must have at most max_seq_len 2 tokens, got",
        )
