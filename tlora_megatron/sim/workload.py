"""Turns trace rows into jobs: attributes are drawn from a mix, recorded times define the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TypeVar

from tlora_megatron.config.documents import read_file
from tlora_megatron.config.job import HF_TARGETS, MEGATRON_TARGETS, rule
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec, refuse_experts
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import chunked
from tlora_megatron.planner.cost.expert_adapters import expert_elements
from tlora_megatron.planner.cost.experts import expert_split
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.scheduler.group_throughput import Speeds
from tlora_megatron.scheduler.queue import ANY_DROPOUT, Job
from tlora_megatron.sim.trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseShare:
    name: str = rule("jobs of one name can train together", nonempty=True)
    config: str = rule("its config.json, relative to the mix", nonempty=True)
    share: float = rule("share of the jobs", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class IntShare:
    value: int = rule("the rank, or sequences per step", ge=1)
    share: float = rule("share of the jobs", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutShare:
    value: float = rule("probability of dropout", ge=0, lt=1)
    share: float = rule("share of the jobs", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetsShare:
    value: tuple[str, ...] = rule(
        "names of the linears", nonempty=True, choices=HF_TARGETS + MEGATRON_TARGETS
    )
    share: float = rule("share of the jobs", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsShare:
    name: str = rule("name of the data set", nonempty=True)
    tokens: tuple[int, ...] = rule("equally likely lengths, ascending", nonempty=True, ge=1)
    share: float = rule("share of the jobs", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMix:
    """Shares of job attributes. Each is drawn independently; shares need not add up to 1."""

    name: str = rule("name of the mix", nonempty=True)
    source: str = rule("where the shares come from", nonempty=True)
    bases: tuple[BaseShare, ...] = rule("base models", nonempty=True)
    ranks: tuple[IntShare, ...] = rule("ranks", nonempty=True)
    batch_sizes: tuple[IntShare, ...] = rule("sequences per step", nonempty=True)
    batch_per_gpu: bool = rule(
        "batch sizes are per GPU that the job asks for, instead of per job",
        default=False,
    )
    targets: tuple[TargetsShare, ...] = rule("linears with adapters", nonempty=True)
    dropouts: tuple[DropoutShare, ...] = rule("dropout rates", nonempty=True)
    lengths: tuple[LengthsShare, ...] = rule("sequence lengths", nonempty=True)
    max_slowdown: float = rule("bound on every job's slowdown", default=1.5, ge=1)


_FOLDER = "tlora_megatron.sim.mixes"
_Option = TypeVar("_Option", BaseShare, IntShare, DropoutShare, TargetsShare, LengthsShare)


def shipped_mixes() -> tuple[str, ...]:
    """Names of the mixes that come with the package."""
    names = (Path(entry.name) for entry in files(_FOLDER).iterdir())
    return tuple(sorted(name.stem for name in names if name.suffix == ".yaml"))


def load_mix(name: str) -> tuple[JobMix, dict[str, ModelSpec]]:
    """Reads a mix by name or path, and the shapes of its base models; refuses what is none."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml", ".json"):
        if name not in shipped_mixes():
            raise must("--mix", f"be a file or one of {', '.join(shipped_mixes())}", name)
        path = Path(str(files(_FOLDER).joinpath(f"{name}.yaml")))
    mix = read_file(JobMix, path, "mix", "--mix")
    specs = {base.name: read_model_spec(path.parent / base.config) for base in mix.bases}
    for base, spec in specs.items():
        refuse_experts(spec.experts, f"base {base} of --mix")
    return mix, specs


class MixDraw:
    """Draws attributes job after job; the same seed gives the same jobs."""

    def __init__(self, mix: JobMix, seed: int) -> None:
        self._mix = mix
        self._rng = Random(f"attributes {seed}")
        self._lengths = {
            entry.name: LengthHistogram.from_lengths(entry.tokens) for entry in mix.lengths
        }

    def next(self, num_gpus: int) -> tuple[str, JobLoad]:
        """The base and the attributes of the next job, which asks for `num_gpus` GPUs."""
        mix = self._mix
        base = self._pick(mix.bases).name
        return base, JobLoad(  # whose draws are in this order
            name="job",
            rank=self._pick(mix.ranks).value,
            batch_size=self._pick(mix.batch_sizes).value * (num_gpus if mix.batch_per_gpu else 1),
            targets=self._pick(mix.targets).value,
            dropout=self._pick(mix.dropouts).value,
            lengths=self._lengths[self._pick(mix.lengths).name],
        )

    def _pick(self, options: tuple[_Option, ...]) -> _Option:
        if len(options) == 1:
            return options[0]
        weights = [option.share for option in options]
        return self._rng.choices(options, weights)[0]


_STATE_BYTES = 2 + 4 * 4
"""Bytes per adapter parameter: bf16 copy, fp32 master, gradient and two moments."""


PATIENCE_S, PATIENCE_FACTOR = 86400.0, 10.0
"""A job is overdue once it has waited for the first and so many times its time alone."""


def make_jobs(
    trace: Trace,
    mix: JobMix,
    specs: dict[str, ModelSpec],
    speeds: Speeds,
    seed: int,
    max_slowdown: float | None = None,
) -> list[Job]:
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
        base, load = draw.next(row.num_gpus)
        dropout = ANY_DROPOUT if load.dropout else 0.0
        kind = speeds.kind(base, replace(load, rank=chunked(load.rank), dropout=dropout))
        alone = speeds.rates((kind,), row.num_gpus)
        if alone is None:
            raise ConfigError(
                f"job {row.name!r} must fit into the memory of {row.num_gpus} GPUs, got rank "
                f"{load.rank}, batch {load.batch_size} on {base}; give another --mix"
            )
        jobs.append(
            Job(
                index=index,
                name=row.name,
                base=base,
                kind=kind,
                num_gpus=row.num_gpus,
                submit_s=row.submit_s,
                isolated_s=row.duration_s,
                isolated_tokens_per_s=alone.total,
                max_slowdown=bound,
                priority=row.priority,
                tenant=row.tenant,
                due_s=row.submit_s + PATIENCE_S + PATIENCE_FACTOR * row.duration_s,
                state_bytes=state_bytes(specs[base], load),
            )
        )
    return jobs


def state_bytes(spec: ModelSpec, load: JobLoad) -> float:
    """Size of a job's adapter, gradients and optimizer state."""
    dense = (target for target in load.targets if not target.startswith("experts."))
    elements = load.rank * sum(sum(spec.target_shape(target)) for target in dense)
    elements += expert_elements(spec, load, expert_split(spec, Plan())).total
    return float(_STATE_BYTES * spec.num_layers * elements)


def flops_per_token(spec: ModelSpec) -> float:
    """The least operations that a token needs in frozen linears and output layer."""
    return 4.0 * (spec.num_layers * spec.row_weights + spec.vocab_size * spec.hidden_size)


def weights_bytes(spec: ModelSpec) -> float:
    """Size of the base model in bf16, with the input embedding."""
    return 2.0 * (spec.num_layers * spec.layer_weights + 2 * spec.vocab_size * spec.hidden_size)
