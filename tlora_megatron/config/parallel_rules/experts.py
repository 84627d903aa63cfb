"""Rules of `parallel.ep_size` and `parallel.expert_tp_size`, and of runs over routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tlora_megatron.config.reader import must
from tlora_megatron.config.replicas import short_form

if TYPE_CHECKING:
    from tlora_megatron.config.job import JobSpec
    from tlora_megatron.config.load import ParallelSpec, RunConfig
    from tlora_megatron.config.run import RunSpec

_WHERE = "over a base with routed experts"
_ON_EXPERTS = ("gate_proj", "up_proj", "down_proj", "linear_fc1", "linear_fc2")
_NO_BITS = "an expert's rows come in any number, which moves the last bits"


def check_expert_sizes(parallel: ParallelSpec) -> None:
    """Refuses sizes that contradict each other, whatever the base is.

    Raises:
        ConfigError: naming the key.
    """
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

    Args:
        unpredicted: the base's model_type if its memory is not predicted; None = it is.

    Raises:
        ConfigError: naming the key, and the job where there is one.
    """
    parallel, run, where = config.parallel, config.run, _WHERE
    if parallel.replicas is not None:
        raise must("parallel.replicas", f"be absent {where}", short_form(parallel.replicas))
    if parallel.cp_by_micro_batch:
        raise must("parallel.cp_by_micro_batch", f"be false {where}", True)
    if run.nano_batches != 1:
        raise must("run.nano_batches", f"be 1 {where}", run.nano_batches)
    if parallel.ep_size > 1:
        _check_alike_rounds(run)
    if unpredicted is not None and run.recompute == "auto":
        rule = f"be none, selective or full over a base of model_type {unpredicted}"
        raise must("run.recompute", f"{rule}, whose memory is not predicted yet", run.recompute)
    if run.deterministic:
        raise must("run.deterministic", f"be false {where}: {_NO_BITS}", True)
    for job in config.jobs:
        check_job_over_experts(job, config)


def check_job_over_experts(job: JobSpec, config: RunConfig) -> None:
    """Refuses settings of a job that a base with routed experts cannot keep yet.

    Raises:
        ConfigError: naming the key and the job.
    """
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
    """Refuses portions of a job over a base with routed experts, where they promise nothing.

    Raises:
        ConfigError: naming the job.
    """
    if job.portion_tokens is not None:
        name = f"portion_tokens of job {job.name}"
        raise must(name, f"be absent {_WHERE}: {_NO_BITS}", job.portion_tokens)


def _check_alike_rounds(run: RunSpec) -> None:
    """Refuses what gives processes that share experts unlike numbers of exchanges."""
    where = "with parallel.ep_size above 1: processes that share experts run the same passes"
    if run.recompute == "auto":
        raise must("run.recompute", f"be none, selective or full {where}", run.recompute)
    if run.round_depth != 1:
        raise must("run.round_depth", f"be 1 {where}", run.round_depth)


def check_run_without_experts(parallel: ParallelSpec) -> None:
    """Refuses expert parallelism over a dense base.

    Raises:
        ConfigError: naming the key.
    """
    for key, usual in (("ep_size", 1), ("expert_tp_size", None)):
        given = getattr(parallel, key)
        if given != usual:
            rule = f"be {'1' if usual else 'absent'} over a base without routed experts"
            raise must(f"parallel.{key}", rule, given)
