"""`tlora train RUN --add FILE` and `--cancel NAME`: jobs of a run that trains already."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.cli.tables import open_console, refuse_duplicates
from tlora_megatron.config.documents import read_document
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import fit_job, read_gang_config
from tlora_megatron.config.reader import ConfigError, must, unknown
from tlora_megatron.config.rules import resolve
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.config.sections import as_job_list, ignored_job_settings, job_to_dict, read_jobs
from tlora_megatron.training.run.output_dir import CONFIG_NAME, TOKENS, LiveRun

_SECTIONS = ("jobs", "defaults")


def add_live_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a run that trains", "These start nothing: they change the live run of CONFIG."
    )
    group.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="FILE",
        help="let the jobs of FILE join it (one job's keys, or a list `jobs`); they must adapt "
        "linears that some job of the run adapts (repeatable)",
    )
    group.add_argument(
        "--cancel",
        action="append",
        default=[],
        metavar="NAME",
        help="save a job of it and let it leave; the others train on (repeatable)",
    )


def change_live_run(args: argparse.Namespace) -> int:
    """Adds and cancels jobs of a live run; returns the exit code."""
    for option, value in (("--nproc", args.nproc), ("--plan", args.plan)):
        if value is not None:
            raise must(option, "be left out with --add and --cancel, which start nothing", value)
    _refuse_overlooked(args)
    live = LiveRun(_output_dir(args))
    console = open_console(stderr=args.json)
    jobs = [job for path in args.add for job in _read_jobs(Path(path))]
    refuse_duplicates("--add and --cancel", [job.name for job in jobs] + args.cancel)
    requests: list[Mapping[str, Any]] = []
    if jobs:
        config = _run_config(live.output_dir)
        if config.run.portion_tokens is None:
            console.print(
                "warning: without run.portion_tokens the last bits of the jobs that train already "
                "depend on those that join",
                style="yellow",
            )
        for sentence in (s for job in jobs for s in ignored_job_settings(job)):
            console.print(f"warning: {sentence}", style="yellow")
        fitted = [fit_job(job, config) for job in jobs]
        requests += [_request(job, config, live) for job in fitted]
    requests += [{"kind": "cancel", "job": name} for name in args.cancel]
    answers = {}
    for request in requests:
        name = request["job"]
        answers[name] = live.ask(request)
        if not args.json:
            sentence = _sentence(name, answers[name], live.output_dir)
            console.print(sentence, style="red" if "error" in answers[name] else None)
    if args.json:
        print(json.dumps(answers, indent=2))
    return int(any("error" in answer for answer in answers.values()))


def _refuse_overlooked(args: argparse.Namespace) -> None:
    """Refuses what could not change a run that trains: only the file's output folder matters."""
    if Path(args.config).is_dir() and args.output_dir is not None:
        remedy = "CONFIG names the run's folder"
        raise must("--output-dir", "be left out here", args.output_dir, remedy)
    for override in args.overrides:
        if Path(args.config).is_dir() or not override.startswith("run.output_dir="):
            raise must(
                "--set",
                "be left out with --add and --cancel, which change no setting of a run",
                override,
            )


def _output_dir(args: argparse.Namespace) -> Path:
    if Path(args.config).is_dir():
        return Path(args.config).resolve()
    document = read_document(Path(args.config), overrides=args.overrides)
    run = document.get("run", {})
    # No more of it: what its jobs have read may be gone by now.
    folder = args.output_dir or (run.get("output_dir") if isinstance(run, dict) else None)
    if not isinstance(folder, str):
        raise must("run.output_dir", "be a folder, which tells the run that trains", folder)
    return Path(resolve(folder, Path.cwd()))


def _read_jobs(path: Path) -> tuple[JobSpec, ...]:
    document = as_job_list(read_document(path))
    for key in document:
        if key not in _SECTIONS:
            raise unknown(str(path), key, _SECTIONS)
    return read_jobs(document, path.resolve().parent)[0]


def _run_config(output_dir: Path) -> RunConfig:
    """Returns the configuration that the run was started with, without its jobs."""
    document = read_document(output_dir / CONFIG_NAME)
    keys = ("base_model", "parallel", "run")
    sections: dict[str, Any] = {key: document[key] for key in keys if key in document}
    try:
        return read_gang_config(sections, output_dir, output_dir=output_dir)
    except ConfigError as error:
        raise ConfigError(f"no job can be added to the run in {output_dir}: {error}") from error


def _request(job: JobSpec, config: RunConfig, live: LiveRun) -> Mapping[str, Any]:
    """Checks a job and keeps its tokens, so that no process of the run has to tokenize."""
    from tlora_megatron.training.data.job_data import TokenCache
    from tlora_megatron.training.run.reading import JobReader

    reader = JobReader(
        config.base_model,
        TokenCache(live.output_dir / TOKENS),
        micro_batch_tokens=config.longest_sequence,
        tp_size=config.parallel.most_tp,
    )
    saved = live.output_dir / "jobs" / job.name / "checkpoints"
    seeded = replace(job, seed=job.seed + config.run.seed)
    keys = reader.read(seeded, saved=saved).keys
    return {"kind": "add", "job": job.name, "document": job_to_dict(job), "tokens": keys}


def _sentence(name: str, answer: Mapping[str, Any], output_dir: Path) -> str:
    if "error" in answer:
        error = str(answer["error"])
        return f"error: {error}" if repr(name) in error else f"error: job {name}: {error}"
    if "num_steps" in answer:
        return (
            f"job {name} has joined the run in {output_dir} behind round {answer['round']}, at "
            f"step {answer['from_step']} of {answer['num_steps']}"
        )
    return f"job {name} is saved at step {answer['step']} and has left the run in {output_dir}"
