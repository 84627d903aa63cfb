"""Turns a controller's order into a job that a rank can train: tokens mapped, checkpoint found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora_megatron.config.schema import RunConfig
from tlora_megatron.config.sections import read_job
from tlora_megatron.files import UserFiles
from tlora_megatron.service.home import Home
from tlora_megatron.service.messages import JobOrder
from tlora_megatron.training.data.job_data import TokenCache
from tlora_megatron.training.run.preparation import PreparedJob
from tlora_megatron.training.run.reading import JobReader, check_job_folders


def order_reader(config: RunConfig, root: str | Path) -> Callable[[Mapping[str, Any]], PreparedJob]:
    """Returns what reads orders over a gang's base; it may run on a thread beside training.

    A job goes on from its newest checkpoint, or starts as its document says. Its tokens come from
    the service's cache: no rank tokenizes, unless the cache has lost them.

    Raises:
        ValueError: if the base cannot be used.
    """
    home = Home(Path(root))

    def read_again(path: Path, what: str) -> bytes:
        # It was resolved when its job was accepted: there are no links in its path.
        with UserFiles(Path("/")).open_file(path, what) as opened:
            return opened.read()

    reader = JobReader(
        config.base_model,
        TokenCache(home.tokens, read_again),
        micro_batch_tokens=config.longest_sequence,
        budget="the service's micro_batch_tokens",
        tp_size=config.parallel.most_tp,
    )

    def read(order: Mapping[str, Any]) -> PreparedJob:
        asked = JobOrder(**order)
        # Under the user's name for it, so that errors have that; inside a gang its id is its name.
        job = read_job(dict(asked.document), None, path=f"jobs.{asked.name}")
        if job.portion_tokens is None and reader.spec.experts is None:
            raise ValueError(f"portion_tokens of job {job.name!r} must be set when it is accepted")
        check_job_folders(home.root, asked.job)
        saved = home.job(asked.job) / "checkpoints"
        found = reader.read(job, keys=asked.tokens, saved=saved, values=False).prepared
        return replace(found, spec=replace(found.spec, name=asked.job))

    return read
