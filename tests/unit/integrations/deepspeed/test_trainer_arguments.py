"""TrainingArguments as the jobs' defaults: what counts where, and what is refused or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed")
pytest.importorskip("accelerate", reason="TrainingArguments need accelerate")

from transformers import TrainingArguments

from tests.helpers.deepspeed_files import FILES, load, section
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import BaseModelSpec, RunSpec
from tlora_megatron.deepspeed.arguments import trainer_values, without_effect
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig

HUGGING_FACE = FILES["Hugging Face, ds_config_zero3.json"]


def arguments(**given: Any) -> TrainingArguments:
    """TrainingArguments as a script makes them, on the CPU and without DeepSpeed's processes."""
    return TrainingArguments(**{"output_dir": "out", "use_cpu": True, **given})


def read(
    folder: Path, document: dict[str, Any] | None = None, /, **given: Any
) -> tuple[JobSpec, RunSpec, DeepSpeedConfig]:
    """The only job, the run and the rest, read with these arguments."""
    open_end = section()
    del open_end["jobs"][0]["max_steps"]
    document = {"tlora": open_end} | (document or {})
    config = load(folder, document, trainer=trainer_values(arguments(**given)))
    return config.run.jobs[0], config.run.run, config


def test_what_is_set_becomes_the_jobs_default(folder: Path) -> None:
    job, run, config = read(
        folder, learning_rate=1e-3, weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-6,
        max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=5, max_steps=20, seed=7,
        save_steps=10, report_to="wandb",
    )  # fmt: skip
    assert job.optimizer.lr == 1e-3
    assert (job.optimizer.betas, job.optimizer.eps) == ((0.9, 0.95), 1e-6)
    assert (job.optimizer.weight_decay, job.optimizer.max_grad_norm) == (0.1, 0.5)
    assert (job.schedule.name, job.schedule.warmup_steps) == ("cosine", 5)
    assert (job.max_steps, job.epochs, job.seed) == (20, None, 7)
    assert (run.checkpoint_every_steps, run.tensorboard) == (10, False)
    (told,) = config.changes
    assert told.startswith("what jobs do not say: from TrainingArguments learning_rate 0.001, ")
    assert "save_steps (run.checkpoint_every_steps 10)" in told


def test_arguments_that_nobody_has_set_count_where_auto_asks(folder: Path) -> None:
    """Without it a job keeps the defaults that the same section has under `tlora train`."""
    job, run, config = read(folder)
    portion = run.portion_tokens
    ours = JobSpec(name="a", data=job.data, max_steps=None, epochs=3, portion_tokens=portion)
    assert job == ours, "but for the end, which has no other default, and the run's portions"
    assert run.checkpoint_every_steps == 50
    assert '("auto" would take TrainingArguments\')' in config.changes[0]
    job, run, _ = read(
        folder, {"tlora": _open(defaults="auto", run={"checkpoint_every_steps": "auto"})}
    )
    assert (job.optimizer.lr, job.schedule.name, job.seed) == (5e-5, "linear", 42)
    assert run.checkpoint_every_steps == 500


def _open(**sections: Any) -> dict[str, Any]:
    found = section()
    del found["jobs"][0]["max_steps"]
    sections["run"] = found["run"] | sections.get("run", {})
    return found | sections


def test_auto_in_deepspeed_s_keys_asks(folder: Path) -> None:
    job, _, config = read(folder, HUGGING_FACE, num_train_epochs=2)
    assert job.optimizer.lr == 5e-5
    assert (job.optimizer.betas, job.optimizer.weight_decay) == ((0.9, 0.999), 0.0)
    assert (job.schedule.name, job.schedule.warmup_steps) == ("constant", 0), "no scheduler"
    assert (job.epochs, job.seed) == (2, 0)
    assert "learning_rate 5e-05" in config.changes[-1]
    job, _, _ = read(folder, HUGGING_FACE, lr_scheduler_type="cosine", warmup_steps=9)
    assert (job.schedule.name, job.schedule.warmup_steps) == ("cosine", 9)
    job, _, _ = read(folder, FILES["Hugging Face, WarmupDecayLR"], warmup_steps=0.1)
    assert (job.schedule.name, job.schedule.warmup_ratio) == ("linear", 0.1)


def test_a_job_s_own_values_win(folder: Path) -> None:
    tlora = section(optimizer={"lr": 3e-3}, epochs=None, schedule={"warmup_steps": 0})
    tlora["defaults"] = {"optimizer": {"weight_decay": 0.2}}
    given = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_steps": 50, "warmup_steps": 0.3}
    job, _, config = read(folder, {"tlora": tlora}, **given)
    assert (job.optimizer.lr, job.optimizer.weight_decay, job.max_steps) == (3e-3, 0.2, 9)
    assert (job.schedule.warmup_steps, job.schedule.warmup_ratio) == (0, 0.0)
    tlora["jobs"].append({"name": "b", "data": {"train": "a.jsonl"}, "optimizer": {"lr": "auto"}})
    config = load(folder, {"tlora": tlora}, trainer=trainer_values(arguments(**given)))
    other = config.run.jobs[1]
    assert (other.optimizer.lr, other.max_steps, other.schedule.warmup_ratio) == (1e-3, 50, 0.3)
    assert "learning_rate 0.001 (not a)" in config.changes[0]


def test_deepspeed_s_values_stand_before_arguments_that_nobody_set(folder: Path) -> None:
    adamw = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.9]}}
    job, _, config = read(folder, {"optimizer": adamw, "gradient_clipping": 0.3})
    assert (job.optimizer.lr, job.optimizer.betas) == (3e-5, (0.8, 0.9))
    assert job.optimizer.max_grad_norm == 0.3
    assert "from DeepSpeed's keys optimizer.lr, optimizer.betas" in config.changes[0]


@pytest.mark.parametrize(
    ("document", "given", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}}, {"learning_rate": 1e-3},
         r"TrainingArguments\.learning_rate must agree with DeepSpeed's keys, where "
         r"optimizer\.lr is 3e-05, got 0\.001"),
        ({"gradient_clipping": 0.3}, {"max_grad_norm": 0.5}, "max_grad_norm must agree"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}},
         {"lr_scheduler_type": "cosine"}, "lr_scheduler_type must agree"),
        ({"bf16": {"enabled": False}}, {"bf16": True}, r"bf16\.enabled must agree"),
        ({}, {"bf16": True}, r"TrainingArguments\.bf16 must agree with the model's float32"),
        ({}, {"fp16": True}, r"TrainingArguments\.fp16 must be left out, got true; one loss scale"),
        ({}, {"optim": "adafactor"}, r"TrainingArguments\.optim must be one of adamw_torch"),
        ({}, {"label_smoothing_factor": 0.1}, "label_smoothing_factor must be left out"),
        ({}, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha must be left out"),
        ({}, {"push_to_hub": True}, "push_to_hub must be left out.*OUT/jobs/NAME/adapter"),
        ({}, {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 500},
         "load_best_model_at_end must be left out"),
        ({}, {"lr_scheduler_type": "polynomial"},
         r"lr_scheduler_type must be one of linear, .* got polynomial: job a would take it"),
        ({}, {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
         "lr_scheduler_kwargs must hold min_lr"),
        ({}, {"num_train_epochs": 1.5},
         r"num_train_epochs must be a whole number, got 1\.5: job a"),
        ({}, {"save_steps": 0.1}, r"save_steps must be steps, got 0\.1: run\.checkpoint_every"),
        ({"tlora": _open(defaults={"lora": {"rank": "auto"}})}, {}, r"lora\.rank must be an int"),
        ({"tlora": _open(jobs="auto")}, {}, "jobs must be a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(
    folder: Path, document: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    base = {"base_model": BaseModelSpec(path=str(folder), dtype="float32")}
    with pytest.raises(ConfigError, match=message):
        load(
            folder,
            {"tlora": _open()} | document,
            trainer=trainer_values(arguments(**given)),
            **base,
        )


def test_an_end_of_their_own_spares_jobs_an_argument_that_none_could_have(folder: Path) -> None:
    job, _, _ = read(folder, {"tlora": section()}, num_train_epochs=1.5)
    assert job.max_steps == 9


def test_schedules(folder: Path) -> None:
    kwargs = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    job, _, _ = read(folder, **kwargs)
    assert (job.schedule.name, job.schedule.min_lr) == ("cosine", 1e-5)
    job, _, _ = read(folder, lr_scheduler_type="constant", warmup_steps=4)
    assert job.schedule.warmup_steps == 0, "as in Trainer, whose constant has no warm-up"
    job, _, _ = read(folder, lr_scheduler_type="constant_with_warmup", warmup_steps=4)
    assert job.schedule.warmup_steps == 4


def test_evaluation_and_recomputation(folder: Path) -> None:
    (folder / "e.jsonl").write_text('{"text": "a"}\n')
    given = {"eval_strategy": "steps", "eval_steps": 5, "gradient_checkpointing": True}
    job, run, _ = read(folder, **given, save_strategy="no")
    assert job.eval_every_steps is None, "it has nothing to evaluate on"
    assert (run.recompute, run.checkpoint_every_steps) == ("full", 0)
    with_eval = section(data={"train": "a.jsonl", "eval": "e.jsonl"})
    job, _, _ = read(folder, {"tlora": with_eval}, **given)
    assert job.eval_every_steps == 5
    with_eval["jobs"][0]["eval_every_steps"] = None
    job, _, _ = read(folder, {"tlora": with_eval}, **given)
    assert job.eval_every_steps is None, "its own, which is null"


def test_arguments_without_effect_are_told() -> None:
    assert without_effect(arguments(logging_steps=3, learning_rate=1.0, report_to=[])) == ""
    told = without_effect(arguments(per_device_train_batch_size=2, save_total_limit=1))
    assert told.endswith("TrainingArguments' per_device_train_batch_size, save_total_limit")
