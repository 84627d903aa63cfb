"""Rules of `parallel.replicas` that concern other keys, and what it fills in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.config.replicas import ReplicaSpec, short_form

if TYPE_CHECKING:
    from tlora_megatron.config.load import ParallelSpec, RunConfig, RunSpec

_SIZES = ("tp_size", "pp_size", "cp_size", "sequence_parallel")


def settle_replicas(parallel: ParallelSpec, run: RunSpec) -> tuple[ParallelSpec, RunSpec]:
    """Fills in what each replica takes from `run`.

    Replicas that are all alike become plain sizes, and what they say of `run` the run's own: a
    configuration that could have done without the key means the same as one that does.

    Raises:
        ConfigError: for sizes beside the key that say otherwise.
    """
    if parallel.replicas is None:
        return parallel, run
    specs = _merged([_filled(spec, run) for spec in parallel.replicas])
    first = specs[0]
    plain = type(parallel)()
    for name in _SIZES:
        given = getattr(parallel, name)
        alike = len(specs) == 1 and given == getattr(first, name)
        if given != getattr(plain, name) and not alike:
            remedy = "each replica says it; leave the key out"
            raise must(f"parallel.{name}", "be absent beside parallel.replicas", given, remedy)
    if len(specs) > 1:
        return replace(parallel, replicas=specs), run
    sizes: dict[str, Any] = {name: getattr(first, name) for name in _SIZES}
    own: dict[str, Any] = {
        "micro_batch_tokens": first.micro_batch_tokens,
        "recompute": first.recompute or run.recompute,
    }
    return replace(parallel, replicas=specs, **sizes), replace(run, **own)


def _filled(spec: ReplicaSpec, run: RunSpec) -> ReplicaSpec:
    return replace(
        spec,
        sequence_parallel=spec.sequence_parallel and spec.tp_size > 1,
        micro_batch_tokens=spec.micro_batch_tokens or run.micro_batch_tokens,
        recompute=spec.recompute or (None if run.recompute == "auto" else run.recompute),
    )


def _merged(specs: Sequence[ReplicaSpec]) -> tuple[ReplicaSpec, ...]:
    """Joins replicas that are equal but for their count."""
    counts: dict[ReplicaSpec, int] = {}
    for spec in specs:
        one = replace(spec, count=1)
        counts[one] = counts.get(one, 0) + spec.count
    return tuple(replace(spec, count=count) for spec, count in counts.items())


def check_replicas(config: RunConfig) -> None:
    """Refuses what unlike replicas cannot keep.

    Raises:
        ConfigError: naming the key, and the job where there is one.
    """
    specs, run = config.parallel.replicas, config.run
    if specs is None or len(specs) == 1:
        return
    if config.parallel.shard_optimizer:
        rule = f"be false with unlike replicas ({short_form(specs)}), which hold unlike parts"
        raise must("parallel.shard_optimizer", rule, True, "replicas that are alike can have it")
    least = min(spec.micro_batch_tokens or run.micro_batch_tokens for spec in specs)
    for job in config.jobs:
        if job.portion_tokens is not None and job.portion_tokens > least:
            rule = f"be at most {least}, which every replica's micro-batch holds"
            raise must(f"portion_tokens of job {job.name}", rule, job.portion_tokens)
    if any(spec.recompute is None for spec in specs):
        rule = "be none, selective or full with unlike parallel.replicas, whose memory differs"
        raise must("run.recompute", rule, run.recompute, "or let each replica name its own")
    if len({spec.tp_size for spec in specs}) > 1:
        _check_unlike_tp(config, short_form(specs))


def _check_unlike_tp(config: RunConfig, form: str) -> None:
    """Replicas cut factors over unlike numbers of ranks, for which fold alone has a rule."""
    where = f"with replicas of unlike tp_size ({form})"
    sharding, nano = config.parallel.lora_sharding, config.run.nano_batches
    if sharding not in ("auto", "fold"):
        raise must("parallel.lora_sharding", f"be auto or fold {where}", sharding)
    if nano != 1:
        raise must("run.nano_batches", f"be 1 {where}", nano)
    for job in config.jobs:
        if job.lora.is_block_diagonal:
            kind, key = job.lora.parametrization, "lora.parametrization"
            raise must(f"{key} of job {job.name}", f"be standard {where}", kind)


def refuse_replicas(parallel: Any, where: str) -> None:
    """Refuses what replicas or micro-batches do apart where another's trainer lays processes out.

    Args:
        parallel: the section as it was read, before any check.
        where: the trainer, such as `DeepSpeed`.

    Raises:
        ConfigError: if it holds `replicas`, or turns `cp_by_micro_batch` on.
    """
    for key in ("replicas", "cp_by_micro_batch"):
        if isinstance(parallel, dict) and parallel.get(key):
            raise ConfigError(
                f"parallel.{key} must be absent under {where}, whose processes are one grid; "
                "`tlora train` has it"
            )
