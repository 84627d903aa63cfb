"""Hugging Face's Trainer for many jobs: its arguments, callbacks and logs, our training.

trainer = MultiLoRATrainer(model=model, args=TrainingArguments(..., deepspeed="ds.json"))
trainer.train()
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import DefaultFlowCallback, Trainer, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import PredictionOutput, TrainOutput

from tlora_megatron import timeline
from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.deepspeed.arguments import (
    NOT_TAKEN,
    deepspeed_source,
    logs_every_round,
    refuse_what_is_not_taken,
    trainer_values,
    without_effect,
)
from tlora_megatron.deepspeed.progress import (
    LogSums,
    RoundCount,
    RoundFlow,
    epoch_of,
    eval_metrics,
    last_results,
    planned_epochs,
)
from tlora_megatron.deepspeed.run import DeepSpeedRun, open_run, read_settings
from tlora_megatron.training.job_state import JobState
from tlora_megatron.training.run.output_dir import CONFIG_NAME

logger = logging.getLogger(__name__)


class MultiLoRATrainer(Trainer):
    """Trains the jobs of the `tlora` section of `args.deepspeed` on a frozen causal model.

    What a job does not say itself comes from `tlora.defaults`, then from DeepSpeed's keys, and then
    from `args`: rate, betas, decay, clipping, schedule, warm-up, end, evaluation, seed; also how
    often to save. One line says what came from where. A step of Trainer is a round of all jobs.
    Logs hold `loss/NAME`, `grad_norm/NAME` and `learning_rate/NAME` of every job, evaluations
    `eval_NAME_loss`. Callbacks may log, evaluate, save or stop, as in Trainer.

    Args:
        args: with `deepspeed`; its `output_dir` replaces `run.output_dir`.

    Raises:
        ValueError: if the section is missing or wrong, or for an argument that would change results
            and cannot be honoured.
    """

    control: TrainerControl
    state: TrainerState

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        if not hasattr(args, "output_dir"):
            raise must("args", "be TrainingArguments with deepspeed", args)
        source = deepspeed_source(args)
        refuse_what_is_not_taken(type(self), kwargs)
        if not isinstance(model, nn.Module):
            remedy = "read it with AutoModelForCausalLM.from_pretrained"
            raise must("model", "be a causal model of transformers", model, remedy)
        self._settings = read_settings(
            model, source, output_dir=str(args.output_dir), trainer=trainer_values(args)
        )
        has_data = any(job.data.eval for job in self._settings.run.jobs)
        if args.eval_strategy != "no" and not has_data:
            given = args.eval_strategy.value
            raise must("args.eval_strategy", "be no without data.eval in any job", given)
        # Trainer wants a data set for eval_strategy.
        super().__init__(model=model, args=args, **{**kwargs, "eval_dataset": []})
        self.eval_dataset = None
        callbacks = self.callback_handler.callbacks
        flow = RoundFlow(logs_every_round=logs_every_round(args))
        self.callback_handler.callbacks = [
            flow if isinstance(callback, DefaultFlowCallback) else callback
            for callback in callbacks
        ]
        self.engine: DeepSpeedRun | None = None
        self._has_trained = False
        if self.is_world_process_zero():
            self._tell_settings()

    def _tell_settings(self) -> None:
        """Says where the jobs' settings come from; a warning, as Trainer shows nothing less."""
        told = [*self._settings.changes, without_effect(self.args)]
        if self.processing_class is not None:
            path = self._settings.run.base_model.path
            told.append(f"processing_class goes to callbacks: data take the tokenizer of {path}")
        for sentence in filter(None, told):
            logger.warning("%s", sentence)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains every job to its end, or until a callback stops it.

        Jobs go on from the checkpoints that `output_dir` holds.

        Args:
            resume_from_checkpoint: true or `output_dir`: it must hold a run.

        Returns:
            The number of rounds, the mean of the last losses of jobs that did not fail, and as
            metrics `loss/NAME` of each, `train_loss` and `train_runtime`.

        Raises:
            ValueError: if there is nothing to resume, or a job's files cannot be used.
        """
        if trial is not None:
            raise must("trial", "be left out: jobs of one section are the trials", trial)
        self._check_resume(resume_from_checkpoint)
        engine = self._opened(anew=True)
        begin_s = time.perf_counter()
        self._begin_state(engine)
        self.is_in_train = True
        try:
            self._train_rounds(engine)
            self._save_jobs(engine)
            summary = engine.finish()
        finally:
            self.is_in_train, self._has_trained = False, True
            engine.close()
        output = self._output(engine.loop.jobs, time.perf_counter() - begin_s)
        self._call("on_train_end")
        if summary:
            open_console().print(f"time: {timeline.time_line(summary['run'])}")
        return output

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluates every job that has `data.eval`; those that have ended keep their last result.

        Args:
            eval_dataset: must be left out.
            metric_key_prefix: what the names below begin with.

        Returns:
            `eval_loss` and `eval_exact_match`, means over the jobs, and `eval_NAME_loss` and
            `eval_NAME_exact_match` of each.

        Raises:
            ValueError: if no job has data to evaluate on.
        """
        if eval_dataset is not None:
            raise must("eval_dataset", "be left out", eval_dataset, NOT_TAKEN["eval_dataset"])
        engine = self._opened()
        begin_s = time.perf_counter()
        if self.is_in_train:
            engine.loop.evaluate_active()
            results = last_results(engine.loop.jobs)
        else:
            results = {**last_results(engine.loop.jobs), **engine.evaluate()}
        if not results:
            raise ConfigError("evaluate needs data.eval in at least one job, got none")
        metrics = eval_metrics(results, metric_key_prefix)
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - begin_s
        self._tell_evaluated(metrics)
        return metrics

    def predict(self, *_: Any, **__: Any) -> PredictionOutput:
        raise NotImplementedError(
            "predict must be called on a model with one adapter: load OUT/jobs/NAME/adapter by PEFT"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes every job's present adapter as a PEFT folder; every process must call it.

        Args:
            output_dir: gets a folder for each job; None = `OUT/jobs/NAME/adapter`, where those of
                jobs that have finished are already.
        """
        engine = self._opened()
        engine.loop.saves.drain()
        own = output_dir is None or _is_same(output_dir, self.args.output_dir)
        for job in engine.loop.jobs:
            written = engine.loop.files.folder(job) / "adapter"
            directory = written if own else Path(str(output_dir)) / job.name
            if job.is_active:
                engine.export(job.name, directory)
            elif directory != written and engine.base.groups.is_writer:
                if written.is_dir():
                    shutil.copytree(written, directory, dirs_exist_ok=True)
                else:
                    logger.warning("job %s has no adapter: %s", job.name, job.reason)

    def hyperparameter_search(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "hyperparameter_search must be left out: give each trial a job of its own in tlora.jobs"
        )

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "push_to_hub must be called for each adapter: hf upload REPO OUT/jobs/NAME/adapter"
        )

    def _opened(self, *, anew: bool = False) -> DeepSpeedRun:
        """The jobs on the model, put there by the first call; `anew` reopens jobs that ended."""
        if self.engine is None:
            timeline.begin_run()
            self.engine = open_run(self._settings, self.model)
            self.model_wrapped = self.model
        elif anew and self._has_trained:
            self.engine.install_jobs(self._settings.run.jobs)
        return self.engine

    def _check_resume(self, asked: str | bool | None) -> None:
        out = Path(self._settings.run.run.output_dir)
        if not asked:
            return
        if not isinstance(asked, bool) and not _is_same(asked, out):
            remedy = f"jobs go on from {out}, or each from its own resume_from"
            raise must("resume_from_checkpoint", "be true or output_dir", asked, remedy)
        if not (out / CONFIG_NAME).is_file():
            raise must("args.output_dir", "hold a run with resume_from_checkpoint", str(out))

    def _begin_state(self, engine: DeepSpeedRun) -> None:
        exportable = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(
            stateful_callbacks=[c for c in exportable if isinstance(c, ExportableState)]
        )
        jobs = engine.loop.jobs
        self._rounds, self._sums = RoundCount(jobs), LogSums()
        self.state.max_steps = self._rounds.estimate(0)
        self.state.num_train_epochs = planned_epochs(jobs)
        self.state.epoch = epoch_of(jobs)
        self.state.compute_steps(self.args, max(1, self.state.max_steps))
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = engine.base.groups.is_writer

    def _train_rounds(self, engine: DeepSpeedRun) -> None:
        self._call("on_train_begin")
        evaluated = last_results(engine.loop.jobs)
        engine.loop.start()
        self.state.epoch = epoch_of(engine.loop.jobs)
        self._tell_new_results(engine, evaluated)
        while not engine.is_over and not self.control.should_training_stop:
            self._call("on_epoch_begin")
            self._train_epoch(engine)
            self._call("on_epoch_end")
            self._log_steps()
            self._evaluate_and_save(engine)

    def _train_epoch(self, engine: DeepSpeedRun) -> None:
        """Runs rounds until every job has seen its data once more, or all end or are stopped."""
        end = int(self.state.epoch) + 1
        while not engine.is_over and not self.control.should_training_stop:
            evaluated, saved = last_results(engine.loop.jobs), engine.loop.saved_steps
            self._call("on_step_begin")
            self._sums.add(engine.train_round())
            self._count_round(engine)
            self._call("on_step_end")
            self._log_steps()
            self._tell_new_results(engine, evaluated)
            self._evaluate_and_save(engine, has_saved=engine.loop.saved_steps != saved)
            if self.state.epoch >= end:
                return

    def _count_round(self, engine: DeepSpeedRun) -> None:
        self.state.global_step += 1
        self.state.max_steps = self._rounds.estimate(self.state.global_step)
        self.state.epoch = epoch_of(engine.loop.jobs)
        self.state.num_input_tokens_seen = engine.loop.tokens

    def _log_steps(self) -> None:
        """Logs the steps since the last log, if a callback has asked for it."""
        logs = self._sums.take() if self.control.should_log else {}
        if logs:
            self.log(logs)

    def _evaluate_and_save(self, engine: DeepSpeedRun, *, has_saved: bool = False) -> None:
        """Does what the callbacks have asked for; jobs that have ended have done it themselves."""
        if self.control.should_evaluate and not engine.is_over:
            self.evaluate()
        if self.control.should_save and not engine.is_over:
            self._save_jobs(engine)
        elif has_saved:
            self._tell_saved(engine)

    def _save_jobs(self, engine: DeepSpeedRun) -> None:
        before = engine.loop.saved_steps
        engine.save()
        if engine.loop.saved_steps != before or self.control.should_save:
            self._call("on_save")

    def _tell_saved(self, engine: DeepSpeedRun) -> None:
        """Tells callbacks of checkpoints; whoever listens finds the files, so training waits."""
        callbacks = self.callback_handler.callbacks
        if any(type(callback).on_save is not TrainerCallback.on_save for callback in callbacks):
            engine.loop.saves.drain()
        self._call("on_save")

    def _tell_new_results(self, engine: DeepSpeedRun, before: Mapping[str, Any]) -> None:
        """Tells callbacks of evaluations that the jobs' own steps have brought."""
        results = last_results(engine.loop.jobs)
        if any(before.get(name) is not result for name, result in results.items()):
            is_asked = self.control.should_evaluate  # of all jobs; the event takes it for done
            self._tell_evaluated(eval_metrics(results, "eval"))
            self.control.should_evaluate |= is_asked

    def _tell_evaluated(self, metrics: dict[str, float]) -> None:
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.is_in_train and self.args.metric_for_best_model is not None:
            is_best = self._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == "best" and is_best:
                self.control.should_save = True

    def _output(self, jobs: tuple[JobState, ...], time_s: float) -> TrainOutput:
        """Logs the end and says which jobs failed; the result of `train`."""
        last = {f"loss/{j.name}": j.last_loss for j in jobs if j.last_loss is not None}
        sound = [j.last_loss for j in jobs if j.last_loss is not None and j.status != "failed"]
        mean = sum(sound) / len(sound) if sound else 0.0
        metrics = {"train_runtime": time_s, "train_loss": mean}
        self.log(dict(metrics))
        for job in jobs:
            if job.status == "failed" and self.state.is_world_process_zero:
                logger.warning("job %s failed: %s", job.name, job.reason)
        return TrainOutput(self.state.global_step, mean, {**metrics, **last})

    def _call(self, event: str) -> None:
        notify = getattr(self.callback_handler, event)
        self.control = notify(self.args, self.state, self.control)


def _is_same(path: str | Path, other: str | Path) -> bool:
    return Path(path).resolve() == Path(other).resolve()
