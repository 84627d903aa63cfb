"""Rules of the section `parallel` that concern several keys, and what they fill in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.config.rules import PORTION_STEP_TOKENS
from tlora_megatron.config.schema import ParallelSpec, ReplicaSpec, RunConfig, RunSpec
from tlora_megatron.config.sections import short_form

DETERMINISM_COST = (
    "0 to 5 % of a step on an H200, most with long documents, and rows that portions leave free"
)
"""The cost in words; docs/determinism.md has its parts."""
MOST_TP = 2
"""A sum of two is the same in either order; of more, a ring begins where the place decides."""
_OVER_EXPERTS = "over a base with routed experts"
_ON_EXPERTS = ("gate_proj", "up_proj", "down_proj", "linear_fc1", "linear_fc2")
_NO_BITS = "an expert's rows come in any number, which moves the last bits"
SIZES = ("tp_size", "pp_size", "cp_size", "sequence_parallel")
"""Keys of the section that each replica, and every plan, gives."""


def check_stages(parallel: ParallelSpec) -> None:
    """Refuses sizes of pipeline stages where there is no pipeline, or more than one."""
    for key in ("first_stage_layers", "last_stage_layers"):
        given = getattr(parallel, key)
        if given is None:
            continue
        if parallel.is_unlike:
            rule = "be absent beside unlike parallel.replicas, whose stages are even"
            raise must(f"parallel.{key}", rule, given)
        if parallel.pp_size == 1:
            raise must(f"parallel.{key}", "be absent where parallel.pp_size is 1", given)


def check_cp_by_micro_batch(config: RunConfig) -> None:
    """Refuses what micro-batches cannot keep whose context-parallel ranks differ."""
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


def check_expert_sizes(parallel: ParallelSpec) -> None:
    """Refuses sizes that contradict each other, whatever the base is."""
    of_expert, tp_size = parallel.expert_tp_size, parallel.tp_size
    if of_expert is not None and of_expert not in (1, tp_size):
        raise must("parallel.expert_tp_size", f"be 1 or tp_size = {tp_size}", of_expert)
    if of_expert == 1 < tp_size and not parallel.sequence_parallel:
        why = "ranks would compute the same rows"
        rule = f"be tp_size = {tp_size} without sequence_parallel: {why}"
        raise must("parallel.expert_tp_size", rule, of_expert)
    if parallel.ep_size > 1 and parallel.replicas is not None:
        rule = "be absent with parallel.ep_size above 1"
        raise must("parallel.replicas", rule, short_form(parallel.replicas))


def check_run_over_experts(config: RunConfig, *, unpredicted: str | None = None) -> None:
    """Refuses settings of a run that a base with routed experts cannot keep yet.

    `unpredicted` is the base's model_type if its memory is not predicted.
    """
    parallel, run, where = config.parallel, config.run, _OVER_EXPERTS
    if parallel.replicas is not None:
        raise must("parallel.replicas", f"be absent {where}", short_form(parallel.replicas))
    if parallel.cp_by_micro_batch:
        raise must("parallel.cp_by_micro_batch", f"be false {where}", True)
    if run.nano_batches != 1:
        raise must("run.nano_batches", f"be 1 {where}", run.nano_batches)
    if parallel.ep_size > 1:
        alike = "with parallel.ep_size above 1: processes that share experts run the same passes"
        if run.recompute == "auto":
            raise must("run.recompute", f"be none, selective or full {alike}", run.recompute)
        if run.round_depth != 1:
            raise must("run.round_depth", f"be 1 {alike}", run.round_depth)
    if unpredicted is not None and run.recompute == "auto":
        rule = f"be none, selective or full over a base of model_type {unpredicted}"
        raise must("run.recompute", f"{rule}, whose memory is not predicted yet", run.recompute)
    if run.deterministic:
        raise must("run.deterministic", f"be false {where}: {_NO_BITS}", True)
    for job in config.jobs:
        check_job_over_experts(job, config)


def check_job_over_experts(job: JobSpec, config: RunConfig) -> None:
    """Refuses settings of a job that a base with routed experts cannot keep yet."""
    check_no_portions(job)
    names = [target.removeprefix("experts.") for target in job.lora.target_modules]
    on_experts = [name for name in names if name in _ON_EXPERTS]
    if not on_experts:
        return
    adapts, parallel = f"job {job.name} adapts {on_experts[0]} of routed experts", config.parallel
    if parallel.shard_optimizer and parallel.ep_size > 1:
        rule = f"be false with ep_size above 1: {adapts}, whose replicas differ"
        raise must("parallel.shard_optimizer", rule, True)


def check_no_portions(job: JobSpec) -> None:
    """Refuses portions of a job over a base with routed experts, where they promise nothing."""
    if job.portion_tokens is not None:
        name = f"portion_tokens of job {job.name}"
        raise must(name, f"be absent {_OVER_EXPERTS}: {_NO_BITS}", job.portion_tokens)


def check_run_without_experts(parallel: ParallelSpec) -> None:
    """Refuses expert parallelism over a dense base; raises `ConfigError` naming the key."""
    for key, usual in (("ep_size", 1), ("expert_tp_size", None)):
        given = getattr(parallel, key)
        if given != usual:
            rule = f"be {'1' if usual else 'absent'} over a base without routed experts"
            raise must(f"parallel.{key}", rule, given)


def settle_replicas(parallel: ParallelSpec, run: RunSpec) -> tuple[ParallelSpec, RunSpec]:
    """Fills in what each replica takes from `run`; those that are all alike become plain sizes.

    Raises:
        ConfigError: for sizes beside the key that say otherwise.
    """
    if parallel.replicas is None:
        return parallel, run
    counts: dict[ReplicaSpec, int] = {}  # of those that are equal but for it
    for spec in parallel.replicas:
        one = replace(
            spec,
            count=1,
            sequence_parallel=spec.sequence_parallel and spec.tp_size > 1,
            micro_batch_tokens=spec.micro_batch_tokens or run.micro_batch_tokens,
            recompute=spec.recompute or (None if run.recompute == "auto" else run.recompute),
        )
        counts[one] = counts.get(one, 0) + spec.count
    specs = tuple(replace(one, count=count) for one, count in counts.items())
    first = specs[0]
    plain = type(parallel)()
    for name in SIZES:
        given = getattr(parallel, name)
        alike = len(specs) == 1 and given == getattr(first, name)
        if given != getattr(plain, name) and not alike:
            remedy = "each replica says it; leave the key out"
            raise must(f"parallel.{name}", "be absent beside parallel.replicas", given, remedy)
    if len(specs) > 1:
        return replace(parallel, replicas=specs), run
    sizes: dict[str, Any] = {name: getattr(first, name) for name in SIZES}
    own: dict[str, Any] = {
        "micro_batch_tokens": first.micro_batch_tokens,
        "recompute": first.recompute or run.recompute,
    }
    return replace(parallel, replicas=specs, **sizes), replace(run, **own)


def check_replicas(config: RunConfig) -> None:
    """Refuses what unlike replicas cannot keep."""
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
    """Refuses `replicas` and `cp_by_micro_batch`, unchecked, for a trainer such as `DeepSpeed`."""
    for key in ("replicas", "cp_by_micro_batch"):
        if isinstance(parallel, dict) and parallel.get(key):
            raise ConfigError(
                f"parallel.{key} must be absent under {where}, whose processes are one grid; "
                "`tlora train` has it"
            )


def settle_deterministic(config: RunConfig) -> RunConfig:
    """Returns the configuration with what `run.deterministic` needs."""
    run, parallel = config.run, config.parallel
    if not run.deterministic:
        return config
    if run.nano_batches == "auto":
        why = "a number: each number of nano-batches sums in its own order"
        raise must("run.nano_batches", f"be {why} (run.deterministic)", "auto", "give 1 or 2")
    for layout in parallel.replicas or (parallel,):
        if layout.cp_size > 1:
            why = "ranks share sequences by row number, which neighbours move"
            rule = f"be 1 with run.deterministic: {why}"
            remedy = "take pp_size, or recompute, for long sequences"
            raise must("parallel.cp_size", rule, layout.cp_size, remedy)
        if layout.tp_size > MOST_TP:
            why = "sums over more ranks depend on a row's place"
            rule = f"be at most {MOST_TP} with run.deterministic: {why}"
            raise must("parallel.tp_size", rule, layout.tp_size, "take pp_size, or recompute")
    if parallel.most_tp > 1:
        parallel = replace(parallel, lora_sharding=_exact_sharding(parallel))
    return with_portions(replace(config, parallel=parallel))


def with_portions(config: RunConfig) -> RunConfig:
    """Returns the configuration with portions for the jobs that have none."""
    replicas = config.parallel.replicas or ()
    least = min((spec.micro_batch_tokens or 0 for spec in replicas), default=0)
    tokens = least or config.run.micro_batch_tokens
    jobs = tuple(
        replace(job, portion_tokens=job.portion_tokens or _portion(job, tokens))
        for job in config.jobs
    )
    return replace(config, jobs=jobs)


def exact_shardings(sequence_parallel: bool) -> tuple[Literal["fold", "s_lora"], ...]:
    """Returns the LoRA shardings that sum all rows on each rank; the first one is the default."""
    return ("s_lora",) if sequence_parallel else ("fold", "s_lora")


def _exact_sharding(parallel: ParallelSpec) -> Literal["fold", "s_lora"]:
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
    steps = -(-job.batch_size * job.max_seq_len // PORTION_STEP_TOKENS)
    return max(1, min(steps * PORTION_STEP_TOKENS, micro_batch_tokens // 2))
