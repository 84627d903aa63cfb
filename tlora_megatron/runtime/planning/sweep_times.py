"""How long a sweep will take by the planner's model, with and without stopping trials early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.rungs import num_kept, rung_steps
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.planner.hardware import HardwareProfile
from tlora_megatron.planner.search import GroupModel
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.runtime.planning.plan_inputs import base_shape, plan_jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The part of a sweep between two rungs."""

    num_trials: int
    to_step: int
    """Of the trial with most steps."""
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTimes:
    """Predicted seconds of training, without start and evaluations, on the fastest layout."""

    layout: str
    stretches: tuple[Stretch, ...]
    whole_s: float
    """All trials together to their ends."""
    alone_s: float
    """All trials to their ends, one after another."""

    @property
    def time_s(self) -> float:
        """With the worst trials stopped at rungs."""
        return sum(stretch.time_s for stretch in self.stretches)


def sweep_times(
    config: RunConfig,
    hardware: HardwareProfile,
    num_gpus: int,
    lengths: LengthHistogram | None = None,
) -> SweepTimes:
    """Predicts the times of the trials of a configuration, of which any may be the ones that go on.

    Args:
        lengths: as in `plan_jobs`.

    Raises:
        ValueError: if the trials do not fit into the GPUs' memory together.
    """
    sweep = config.sweep
    assert sweep is not None, "a sweep has been read"
    spec = base_shape(config.base_model)
    loads = plan_jobs(config, spec, lengths)
    steps = _num_steps(config, spec.vocab_size)
    model = GroupModel(spec, hardware)

    def rate(group: Sequence[JobLoad]) -> float:
        estimate = model.estimate(group, num_gpus)
        if not estimate.fits:
            raise ValueError(
                f"a sweep's trials must fit into memory together, got {len(group)} that need "
                f"{estimate.memory_bytes / 2**30:.1f} GiB of a {hardware.gpu}'s "
                f"{hardware.memory_bytes / 2**30:.1f}; take fewer trials, lower ranks or more GPUs"
            )
        return sum(estimate.tokens_per_s)

    def time_s(places: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> float:
        tokens = sum(loads[i].batch_tokens * (ends[i] - begins[i]) for i in places)
        return tokens / rate([loads[i] for i in places])

    everyone, zero = range(len(loads)), [0] * len(loads)
    stop, begins, count, stretches = sweep.spec.stop, zero, len(loads), []
    at = () if stop is None else stop.at
    rungs = [rung_steps(at, n, job.name) for n, job in zip(steps, config.jobs, strict=True)]
    for rung in range(len(at) + 1):
        ends = [[*own, total][rung] for own, total in zip(rungs, steps, strict=True)]
        # Which trials go on nobody knows: as many, spread over all.
        places = [place * len(loads) // count for place in range(count)]
        took_s = time_s(places, begins, ends)
        stretches.append(Stretch(num_trials=count, to_step=max(ends), time_s=took_s))
        begins, count = ends, num_kept(count, 0.0 if stop is None else stop.keep)
    plan = model.estimate(loads, num_gpus).plan
    return SweepTimes(
        layout="" if plan is None else plan.label,
        stretches=tuple(stretches),
        whole_s=time_s(everyone, zero, steps),
        alone_s=sum(time_s([place], zero, steps) for place in everyone),
    )


def _num_steps(config: RunConfig, vocab_size: int) -> list[int]:
    """The steps of each trial; only those that count epochs need the data."""
    count = 0
    if any(job.max_steps is None for job in config.jobs):
        # Here, since they import numpy and transformers.
        from tlora_megatron.training.data.job_data import load_job_data
        from tlora_megatron.training.data.tokenize import load_tokenizer

        tokenizer = load_tokenizer(config.base_model.folder)
        count = len(load_job_data(config.jobs[0], tokenizer, vocab_size).train)
    return [_steps_of(job, count) for job in config.jobs]


def _steps_of(job: JobSpec, num_sequences: int) -> int:
    if job.max_steps is not None:
        return job.max_steps
    return -(-(job.epochs or 0) * num_sequences // job.batch_size)
