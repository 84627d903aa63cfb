"""A process of the pool: takes submissions on stdin, answers on stdout, one line of JSON each.

    python -m tlora_megatron.service.prepare.worker

Here a job's data are read for the only time, its tokens cached. It ends when its stdin does, and
with that when the controller dies.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import stat
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora_megatron.channel import LinePipe
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.parallel_rules import check_no_portions
from tlora_megatron.config.reader import must
from tlora_megatron.config.rules import portion_of, resolve_job_paths
from tlora_megatron.config.sections import job_to_dict, read_base_model
from tlora_megatron.files import OPEN_FILE, OPEN_FOLDER, UserFiles, write_json
from tlora_megatron.model.spec import refuse_gpt_oss
from tlora_megatron.planner.workload import LengthHistogram, guessed_lengths
from tlora_megatron.service.home import JOB_NAME, Home, make_folder
from tlora_megatron.service.logs import listen_to_warnings
from tlora_megatron.service.prepare.submission import (
    Outcome,
    PrepareRules,
    Refused,
    Submission,
    Validated,
)

if TYPE_CHECKING:
    from tlora_megatron.model.spec import ModelSpec
    from tlora_megatron.training.run.reading import ReadJob


logger = logging.getLogger(__name__)

_BUDGET = "the service's micro_batch_tokens"
_START_ENDINGS = (".json", ".safetensors")
_START_DEPTH = 2
"""Folders below `jobs/NAME`: checkpoints, and its steps."""


def validate(job_id: str, submission: Submission, rules: PrepareRules) -> Outcome:
    """Reads and checks all that a job starts from; keeps its tokens."""
    with listen_to_warnings() as warnings:
        try:
            found = _validate(job_id, submission, rules)
        except ValueError as error:
            return Refused(job=job_id, error=str(error))
        except OSError as error:  # such as a full disk
            return Refused(
                job=job_id, error=f"job {submission.name!r} cannot be prepared now: {error}"
            )
    return replace(found, notes=tuple(warning.getMessage() for warning in warnings))


def _validate(job_id: str, submission: Submission, rules: PrepareRules) -> Validated:
    from tlora_megatron.training.data.job_data import TokenCache
    from tlora_megatron.training.run.reading import JobReader

    home = Home(Path(rules.root))
    # A job that came over the network reads what it reaches without a link in the service's folder.
    within = rules.data_root if submission.tenant is None else rules.root
    files = UserFiles(None if within is None else Path(within))
    job, base = submission.job_spec(), read_base_model(dict(submission.base_model), Path("/"))
    if files.root is not None and submission.tenant is None:  # it is still there and allowed
        files.open_file(base.config_file, "base_model").close()
    if files.root is None:
        job = resolve_job_paths(job, f"jobs.{job.name}", Path("/"))
    else:
        job = take_start_files(job, files, home.job(job_id))
    if (job.portion_tokens or 0) > rules.micro_batch_tokens:
        rule = f"be at most {_BUDGET} = {rules.micro_batch_tokens}"
        raise must(f"portion_tokens of job {job.name!r}", rule, job.portion_tokens)

    def read(path: Path, what: str) -> bytes:
        with files.open_file(path, what) as opened:
            return opened.read()

    reader = JobReader(
        base,
        TokenCache(home.tokens, read),
        micro_batch_tokens=rules.micro_batch_tokens,
        budget=_BUDGET,
    )
    refuse_gpt_oss(reader.spec.model_type, f"the base of job {job.name!r} in a service")
    if reader.spec.experts is not None:
        check_no_portions(job)
    read_job = reader.read(job)
    # Targets have the names of the base's linears from here on.
    job = replace(job, lora=read_job.prepared.spec.lora)
    found = _accepted(job_id, job, read_job, rules, reader.spec)
    # For people and scripts that look into the folder: the store is what counts.
    kept = {"name": job.name, "base_model": submission.base_model, "job": found.document}
    write_json(make_folder(home.job(job_id)) / JOB_NAME, kept)
    return found


def _accepted(
    job_id: str, job: JobSpec, read: ReadJob, rules: PrepareRules, spec: ModelSpec
) -> Validated:
    """Fixes a job's portions, which keep its bits; over routed experts nothing does."""
    measured: dict[str, Any] = {"longest": job.max_seq_len}
    if job.driven:  # nobody knows what its client will send
        measured["lengths"] = guessed_lengths(job.max_seq_len).pairs
    else:
        measured = _measure(read)
    if job.batch_size > (rows := measured.get("sequences", job.batch_size)):
        logger.warning(
            "job %r has a batch_size of %d and %d rows of data: a step takes each row %.3g times",
            job.name,
            job.batch_size,
            rows,
            job.batch_size / rows,
        )
    if job.portion_tokens is None and spec.experts is None:
        portion = portion_of(measured["lengths"], job.batch_size, rules.micro_batch_tokens)
        job = replace(job, portion_tokens=portion)
    checkpoint = read.prepared.checkpoint
    return Validated(
        job=job_id,
        document=job_to_dict(job),
        digest=read.prepared.data.fingerprint,
        from_step=0 if checkpoint is None else checkpoint.step,
        **measured,
    )


def _measure(read: ReadJob) -> dict[str, Any]:
    """The fields of `Validated` that say how large a job is."""
    from tlora_megatron.training.data.mapped_tokens import lengths_of, rows_of

    data, plan = read.prepared.data, read.prepared.plan
    rows = rows_of(data.train, read.prepared.spec.num_sides)
    longest_eval = int((lengths_of(data.eval) - 1).max(initial=0))
    targets = sum(int(sequence.is_target.sum()) for sequence in data.train)
    epoch_tokens = int(rows.sum())
    return {
        "tokens": read.keys,
        "num_steps": plan.num_steps,
        "sequences": len(rows),
        "epoch_tokens": epoch_tokens,
        "train_tokens": round(plan.num_epochs * epoch_tokens),
        "longest": max(int(rows.max()), longest_eval),
        "longest_eval": longest_eval,
        "target_share": min(1.0, targets / epoch_tokens),
        "lengths": LengthHistogram.from_lengths(rows.tolist()).pairs,
        "num_truncated": data.num_truncated,
        "num_dropped": data.num_dropped,
    }


def take_start_files(job: JobSpec, files: UserFiles, job_folder: Path) -> JobSpec:
    """Copies adapter and checkpoint that a job starts from; returns the job with its own copies.

    No gang then reads a path that a tenant has named.

    Raises:
        ValueError: naming the field, if it leads where it must not.
    """
    for name in ("init_from", "resume_from"):
        path = getattr(job, name)
        if path is None:
            continue
        what, target = f"{name} of job {job.name!r}", job_folder / "start" / name
        shutil.rmtree(target, ignore_errors=True)
        with files.open_folder(path, what) as folder:
            _copy_start(folder, target, what, _START_DEPTH)
        copied: dict[str, Any] = {name: str(target)}
        job = replace(job, **copied)
    return job


def _copy_start(folder: int, target: Path, what: str, depth: int) -> None:
    make_folder(target)
    for name in sorted(os.listdir(folder)):
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(kind) and depth and not name.startswith("."):
            inner = os.open(name, OPEN_FOLDER, dir_fd=folder)
            try:
                _copy_start(inner, target / name, what, depth - 1)
            finally:
                os.close(inner)
        elif name.endswith(_START_ENDINGS):
            if not stat.S_ISREG(kind):
                raise ValueError(f"{what} must hold files and no links, got {name!r}")
            with (
                open(os.open(name, OPEN_FILE, dir_fd=folder), "rb") as source,
                open(target / name, "xb", opener=partial(os.open, mode=0o600)) as copy,
            ):
                shutil.copyfileobj(source, copy, 1 << 20)


_NICE = 10
"""Training goes first on a host's cores."""
_DAY_S = 86_400.0


def main() -> None:
    """Answers until stdin ends."""
    os.nice(_NICE)
    pipe = LinePipe.of_child()
    logging.basicConfig(level=logging.WARNING)
    # The first submission would wait for it.
    import tlora_megatron.training.run.reading  # noqa: F401

    serve(pipe)


def serve(pipe: LinePipe) -> None:
    """Answers one request after the other; tidies the cache of tokens before the first of a day."""
    from tlora_megatron.training.data.job_data import TokenCache

    tidied_s = -math.inf
    while not pipe.is_over:
        pipe.wait()
        for request in pipe.receive():
            if time.monotonic() > tidied_s + _DAY_S:
                TokenCache(Home(Path(request["rules"]["root"])).tokens).prune()
                tidied_s = time.monotonic()
            outcome = _answer(request)
            kind = "refused" if isinstance(outcome, Refused) else "validated"
            pipe.send({kind: asdict(outcome)})


def _answer(request: dict[str, Any]) -> Outcome:
    job_id, name = str(request["job"]), request["submission"].get("name")
    try:
        submission = Submission(**request["submission"])
        return validate(job_id, submission, PrepareRules(**request["rules"]))
    except Exception as error:
        logger.exception("job %s", job_id)
        kind = type(error).__name__
        return Refused(job=job_id, error=f"job {name!r} could not be checked: {kind}: {error}")


if __name__ == "__main__":
    main()
