"""Fills in what `run.deterministic` needs, and refuses where neighbours would decide bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import must
from tlora_megatron.config.replicas import ReplicaSpec, short_form

if TYPE_CHECKING:
    from tlora_megatron.config.load import ParallelSpec, RunConfig

COST = "0 to 5 % of a step on an H200, most with long documents, and rows that portions leave free"
"""The cost in words; docs/determinism.md has its parts."""
_PORTION = 1024
"""Default portions are multiples of this."""
MOST_TP = 2
"""A sum of two is the same in either order; of more, a ring begins where the place decides."""


def settle_deterministic(config: RunConfig) -> RunConfig:
    """Returns the configuration with what `run.deterministic` needs; as it is without the key.

    Raises:
        ConfigError: for a setting under which a job's bits depend on its neighbours.
    """
    run, parallel = config.run, config.parallel
    if not run.deterministic:
        return config
    if run.nano_batches == "auto":
        why = "a number: each number of nano-batches sums in its own order"
        raise must("run.nano_batches", f"be {why} (run.deterministic)", "auto", "give 1 or 2")
    for layout in parallel.replicas or (parallel,):
        _check_layout(layout)
    least = min((spec.micro_batch_tokens or 0 for spec in parallel.replicas or ()), default=0)
    tokens = least or run.micro_batch_tokens
    jobs = tuple(
        replace(job, portion_tokens=job.portion_tokens or _portion(job, tokens))
        for job in config.jobs
    )
    if parallel.most_tp > 1:
        parallel = replace(parallel, lora_sharding=_sharding(parallel))
    return replace(config, parallel=parallel, jobs=jobs)


def _check_layout(parallel: ParallelSpec | ReplicaSpec) -> None:
    if parallel.cp_size > 1:
        why = "ranks share sequences by row number, which neighbours move"
        rule = f"be 1 with run.deterministic: {why}"
        remedy = "take pp_size, or recompute, for long sequences"
        raise must("parallel.cp_size", rule, parallel.cp_size, remedy)
    if parallel.tp_size > MOST_TP:
        why = "sums over more ranks depend on a row's place"
        rule = f"be at most {MOST_TP} with run.deterministic: {why}"
        raise must("parallel.tp_size", rule, parallel.tp_size, "take pp_size, or recompute")


def exact_shardings(sequence_parallel: bool) -> tuple[Literal["fold", "s_lora"], ...]:
    """Returns the LoRA shardings that sum all rows on each rank; the first one is the default."""
    return ("s_lora",) if sequence_parallel else ("fold", "s_lora")


def _sharding(parallel: ParallelSpec) -> Literal["fold", "s_lora"]:
    """The sharding that was asked for, or the default, whatever it was predicted to take."""
    asked, has_sp = parallel.lora_sharding, parallel.any_sequence_parallel
    exact = exact_shardings(has_sp)
    if has_sp and len({spec.tp_size for spec in parallel.replicas or ()}) > 1:
        why = "which needs s_lora, and replicas of unlike tp_size need fold"
        rule = f"name no sequence parallelism with run.deterministic, {why}"
        raise must("parallel.replicas", rule, short_form(parallel.replicas or ()))
    for sharding in exact:
        if asked in ("auto", sharding):
            return sharding
    why = "others divide rows or columns where neighbours decide"
    beside = " and sequence_parallel" if has_sp else ""
    rule = f"be {', '.join(exact)} or auto with run.deterministic{beside}: {why}"
    raise must("parallel.lora_sharding", rule, asked)


def _portion(job: JobSpec, micro_batch_tokens: int) -> int:
    """The least multiple of 1,024 that covers a batch, at most half a micro-batch."""
    covers = -(-job.batch_size * job.max_seq_len // _PORTION) * _PORTION
    return max(1, min(covers, micro_batch_tokens // 2))
