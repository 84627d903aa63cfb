"""Turns trace rows into jobs: attributes are drawn, the recorded time defines the work."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlora_megatron.config.reader import ConfigError
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.experts.adapters import expert_elements
from tlora_megatron.planner.cost.experts.split import expert_split
from tlora_megatron.planner.workload import JobLoad
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.jobs import Job
from tlora_megatron.sim.job_mix import Attributes, JobMix, MixDraw
from tlora_megatron.sim.trace import Trace, TraceRow

_STATE_BYTES = 2 + 4 * 4
"""Bytes per adapter parameter: bf16 copy, fp32 master, gradient and two moments."""

_RANK_STEP = 16
_ANY_DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Waiting time after which a job is overdue: `base_s + factor * time alone`."""

    base_s: float = 86400.0
    factor: float = 10.0

    def due_s(self, row: TraceRow) -> float:
        """The time from which the job of a trace row is overdue."""
        return row.submit_s + self.base_s + self.factor * row.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The jobs of a run in order of submission, and the trace row of each."""

    jobs: list[Job]
    rows: tuple[TraceRow, ...]


_PATIENCE = Patience()


def make_workload(
    trace: Trace,
    mix: JobMix,
    specs: dict[str, ModelSpec],
    speeds: Speeds,
    seed: int,
    max_slowdown: float | None = None,
    patience: Patience = _PATIENCE,
) -> Workload:
    """Jobs whose work is what each would train alone in the time that the trace recorded.

    A job's tokens are its speed alone on the GPUs it asks for times its recorded duration. So every
    job that trains alone takes as long as in the trace, whatever attributes were drawn.

    Raises:
        ValueError: if a job fits the memory of neither the GPUs it asks for nor a node's.
    """
    draw = MixDraw(mix, seed)
    bound = mix.max_slowdown if max_slowdown is None else max_slowdown
    jobs = []
    for index, row in enumerate(trace.rows):
        drawn = draw.next(row.num_gpus)
        kind, tokens_per_s = _speed_alone(row, drawn, speeds)
        jobs.append(
            Job(
                index=index,
                name=row.name,
                base=drawn.base,
                kind=kind,
                num_gpus=row.num_gpus,
                submit_s=row.submit_s,
                isolated_s=row.duration_s,
                isolated_tokens_per_s=tokens_per_s,
                max_slowdown=bound,
                priority=row.priority,
                tenant=row.tenant,
                due_s=patience.due_s(row),
                state_bytes=state_bytes(specs[drawn.base], drawn.load),
            )
        )
    return Workload(jobs=jobs, rows=trace.rows)


def _speed_alone(row: TraceRow, drawn: Attributes, speeds: Speeds) -> tuple[int, float]:
    """A job's kind, and its tokens per second alone on the GPUs it asks for."""
    kind = speeds.kind(drawn.base, _as_costed(drawn.load))
    rates = speeds.rates((kind,), row.num_gpus)
    if rates is None:
        raise ConfigError(
            f"job {row.name!r} must fit into the memory of {row.num_gpus} GPUs, got rank "
            f"{drawn.load.rank}, batch {drawn.load.batch_size} on {drawn.base}; give another --mix"
        )
    return kind, rates.total


def _as_costed(load: JobLoad) -> JobLoad:
    """The load as the cost model sees it, so that similar jobs are of one kind.

    Kernels round ranks up to multiples of 16, and every dropout rate costs the same.
    """
    return replace(
        load,
        rank=-(-load.rank // _RANK_STEP) * _RANK_STEP,
        dropout=_ANY_DROPOUT if load.dropout else 0.0,
    )


def state_bytes(spec: ModelSpec, load: JobLoad) -> float:
    """Size of a job's adapter, gradients and optimizer state."""
    dense = (target for target in load.targets if not target.startswith("experts."))
    elements = load.rank * sum(sum(spec.target_shape(target)) for target in dense)
    elements += expert_elements(spec, load, expert_split(spec, Plan())).total
    return float(_STATE_BYTES * spec.num_layers * elements)


def flops_per_token(spec: ModelSpec) -> float:
    """The least operations that a token needs: frozen linears and output layer, both passes.

    Attention, adapters and recomputation are left out.
    """
    return 4.0 * (spec.num_layers * spec.row_weights + spec.vocab_size * spec.hidden_size)


def weights_bytes(spec: ModelSpec) -> float:
    """Size of the base model in bf16, with the input embedding."""
    return 2.0 * (spec.num_layers * spec.layer_weights + 2 * spec.vocab_size * spec.hidden_size)
