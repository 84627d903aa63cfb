"""Rules of `parallel.cp_by_micro_batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tlora_megatron.config.reader import must
from tlora_megatron.config.replicas import short_form

if TYPE_CHECKING:
    from tlora_megatron.config.load import RunConfig


def check_cp_by_micro_batch(config: RunConfig) -> None:
    """Refuses what micro-batches cannot keep whose context-parallel ranks differ.

    Raises:
        ConfigError: naming the key, and the job where there is one.
    """
    parallel = config.parallel
    if not parallel.cp_by_micro_batch:
        return
    where = "with parallel.cp_by_micro_batch"
    if parallel.replicas is not None:
        remedy = "give parallel.cp_size, or take plain replicas"
        raise must("parallel.replicas", f"be absent {where}", short_form(parallel.replicas), remedy)
    if parallel.cp_size == 1:
        return
    if parallel.cp_size & (parallel.cp_size - 1):
        raise must("parallel.cp_size", f"be a power of two {where}", parallel.cp_size)
    if parallel.pp_size > 1:
        why = "stages hand on micro-batches of one length and layout"
        raise must("parallel.pp_size", f"be 1 {where}: {why}", parallel.pp_size)
    for job in config.jobs:
        if job.portion_tokens is not None:
            why = "context-parallel ranks share rows by number, which neighbours move"
            name = f"portion_tokens of job {job.name}"
            raise must(name, f"be absent {where}: {why}", job.portion_tokens)
