"""The data of jobs that a rank is ordered to train: mapped from the service's cache of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlora_megatron.config.base_model import BaseModelSpec
from tlora_megatron.config.job import JobSpec
from tlora_megatron.model.spec import read_model_spec
from tlora_megatron.service.below import UserFiles
from tlora_megatron.service.home import Home
from tlora_megatron.training.data.job_data import JobData
from tlora_megatron.training.data.jsonl_file import JsonlFile
from tlora_megatron.training.data.token_cache import TokenCache, TokenizerFolder

ReadData = Callable[[Mapping[str, Any], JobSpec], JobData]
"""Takes a `JobOrder` and its job."""


def data_reader(base: BaseModelSpec, root: str | Path) -> ReadData:
    """Returns what reads the data of orders; it may run on a thread beside training.

    No rank tokenizes, unless the cache has lost what the controller found there.

    Args:
        base: section `base_model` of the gang.
        root: the service's folder.

    Raises:
        ValueError: if the base cannot be used.
    """
    cache = TokenCache(Home(Path(root)).tokens, _read_again)
    vocab_size = read_model_spec(base.config_file).vocab_size

    def read(order: Mapping[str, Any], job: JobSpec) -> JobData:
        # Made for each: somebody may have changed the tokenizer, and then the keys are others.
        source = TokenizerFolder(base.folder)
        return cache.load(job, source, vocab_size, order.get("tokens")).data

    return read


def _read_again(file: JsonlFile) -> bytes:
    """Reads a file that was resolved when its job was accepted: there are no links in its path."""
    what = f"{file.key} of job {file.job.name!r}"
    with UserFiles(Path("/")).open_file(file.path, what) as opened:
        return opened.read()
