"""The trials of a sweep: one job, and the keys of it that trials set otherwise."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tlora_megatron.config.documents import merge
from tlora_megatron.config.job import JobSpec, rule
from tlora_megatron.config.reader import ConfigError, must, read_spec, show, unknown

Metric = Literal["eval_loss", "eval_exact_match", "eval_rewards/accuracies", "eval_rewards/margins"]
MOST_TRIALS = 1024
_SCALES = ("uniform", "log_uniform")
_NOT_SWEPT = {
    "name": "every trial gets a name of its own",
    "data": "losses on other data do not compare",
    "max_seq_len": "it cuts the evaluation data, and losses on other data do not compare",
    "driven": "a client's job has no end",
    "service": "it changes no result",
    "preference": "another loss of pairs does not compare; take metric: eval_rewards/accuracies",
}
"""Sections of a job that trials may not set, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopSpec:
    """Synchronous halving: which trials of a sweep go on, and when that is decided."""

    keep: float = rule("share of the trials at a rung that go on, rounded up", gt=0, lt=1)
    at: tuple[float, ...] = rule(
        "the rungs: shares of a trial's own steps behind which it waits for the others",
        gt=0,
        lt=1,
        nonempty=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """What a sweep tries, by which metric, and which trials it stops early."""

    over: dict[str, Any] | None = rule(
        "values by keys of the job, such as `lora.rank`: a list, or `{uniform: [low, high]}` or "
        "`{log_uniform: [low, high]}`",
        default=None,
    )
    list: tuple[dict[str, Any], ...] | None = rule(
        "instead of `over`: the trials one by one",
        default=None,
        nonempty=True,
    )
    trials: int | None = rule(
        "so many, drawn at random; null: the grid",
        default=None,
        ge=1,
    )
    seed: int = rule("seed of what is drawn", default=0, ge=0)
    metric: Metric = rule(
        "the least eval_loss is best, or the most of another",
        default="eval_loss",
    )
    stop: StopSpec | None = rule(
        "stop the worst early; null: all train to their ends", default=None
    )

    @property
    def prefers_more(self) -> bool:
        """True if a larger value of the metric is better."""
        return self.metric != "eval_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep that has been read."""

    spec: SweepSpec
    settings: Mapping[str, Mapping[str, Any]]
    """What each trial sets: by its job's name, in the order of trials, values by dotted key."""


def read_sweep(raw_sweep: Any, raw_job: Any) -> tuple[Sweep, list[dict[str, Any]]]:
    """Reads the sections `sweep` and `job`; returns the sweep and its trials' jobs, unchecked.

    Raises:
        ConfigError: for a mistake of the sweep's own.
    """
    spec = read_spec(SweepSpec, raw_sweep, "sweep")
    if not isinstance(raw_job, dict):
        raise must("job", "be a mapping: the job that all trials begin as", raw_job)
    _check_job(spec, raw_job)
    trials = _trials(spec)
    width, name = len(str(len(trials) - 1)), str(raw_job["name"])
    settings = {f"{name}-{number:0{width}}": trial for number, trial in enumerate(trials)}
    jobs = [_with_settings(raw_job, own, trial) for trial, own in settings.items()]
    return Sweep(spec=spec, settings=settings), jobs


def _check_job(spec: SweepSpec, job: Mapping[str, Any]) -> None:
    if not isinstance(job.get("name"), str):
        raise must("job.name", "be a string: trials are named after it", job.get("name"))
    data = job.get("data")
    if not isinstance(data, dict) or data.get("eval") is None:
        what = "sweep.metric" if spec.stop is None else "sweep.stop"
        name = job["name"]
        raise ConfigError(f"{what} needs data.eval: {spec.metric} is measured on it (job {name})")
    if spec.metric.startswith("eval_rewards") and job.get("preference") is None:
        raise must("sweep.metric", "be eval_loss or eval_exact_match without pairs", spec.metric)
    at = () if spec.stop is None else spec.stop.at
    if list(at) != sorted(set(at)):
        raise must("sweep.stop.at", "ascend", list(at))


def _with_settings(job: dict[str, Any], values: Mapping[str, Any], name: str) -> dict[str, Any]:
    own: dict[str, Any] = {"name": name}
    for key, value in values.items():
        *sections, last = key.split(".")
        node = own
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return merge(job, own)


def _trials(spec: SweepSpec) -> list[dict[str, Any]]:
    """What each trial sets."""
    if (spec.over is None) == (spec.list is None):
        got = "neither" if spec.over is None else "both"
        raise ConfigError(f"sweep must set exactly one of over and list, got {got}")
    if spec.list is not None:
        if spec.trials is not None:
            raise must("sweep.trials", "be null with sweep.list", spec.trials)
        return _checked(
            [
                {
                    key: _read(check_key(f"sweep.list[{i}]", key, spec.metric), trial[key])
                    for key in trial
                }
                for i, trial in enumerate(spec.list)
            ]
        )
    assert spec.over is not None, "one of them is set"
    ranges = {key: _range(spec, key, given) for key, given in spec.over.items()}
    if not ranges:
        raise must("sweep.over", "not be empty", {})
    drawn = [key for key, found in ranges.items() if not isinstance(found, list)]
    if drawn and spec.trials is None:
        raise ConfigError(f"sweep.trials must be given: sweep.over.{drawn[0]} is drawn at random")
    if drawn:
        _check_count(spec.trials or 0)
        return [_drawn(spec.seed, number, ranges) for number in range(spec.trials or 0)]
    _check_count(spec.trials or math.prod(len(found) for found in ranges.values()))
    grid = [dict(zip(ranges, values, strict=True)) for values in product(*ranges.values())]
    if spec.trials is None:
        return _checked(grid)
    if spec.trials > len(grid):
        rule_ = f"be at most the {len(grid)} combinations of sweep.over"
        raise must("sweep.trials", rule_, spec.trials)
    order = random.Random(spec.seed)
    order.shuffle(grid)
    return _checked(grid[: spec.trials])


def _checked(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    _check_count(len(trials))
    for index, trial in enumerate(trials):
        if trial in trials[:index]:
            first = trials.index(trial)
            raise ConfigError(f"trials of a sweep must differ, got {index} as {first}: {trial}")
    return trials


def _check_count(count: int) -> None:
    if count > MOST_TRIALS:
        raise ConfigError(f"a sweep must have at most {MOST_TRIALS:,} trials, got {count:,}")


class Drawn(NamedTuple):
    """Values of a key that are drawn between two ends."""

    scale: str
    low: float
    high: float
    is_whole: bool


def _range(spec: SweepSpec, key: str, given: Any) -> list[Any] | Drawn:
    """The values of a key, or what they are drawn from."""
    hint = check_key("sweep.over", key, spec.metric)
    path = f"sweep.over.{key}"
    if isinstance(given, list):
        if not given:
            raise must(path, "not be empty", given)
        return [_read(hint, value) for value in given]
    if not isinstance(given, dict) or len(given) != 1 or next(iter(given)) not in _SCALES:
        raise must(path, f"be a list of values, or one of {', '.join(_SCALES)}", given)
    ((scale, ends),) = given.items()
    bounds = read_spec(_Ends, {"ends": ends}, path).ends
    is_whole = int in (hint, *get_args(hint)) and float not in (hint, *get_args(hint))
    if not is_whole and float not in (hint, *get_args(hint)):
        raise must(path, "be a list of values: it is no number", given)
    low, high = bounds
    if low >= high or (scale == "log_uniform" and low <= 0):
        floor = "above 0 and " if scale == "log_uniform" else ""
        raise must(f"{path}.{scale}", f"have its first end {floor}below its second", list(bounds))
    return Drawn(scale, low, high, is_whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ends:
    ends: tuple[float, float]


def _drawn(seed: int, number: int, ranges: Mapping[str, Sequence[Any] | Drawn]) -> dict[str, Any]:
    """Draws a trial from its own number alone."""
    draw = random.Random(f"{seed}/{number}")
    found: dict[str, Any] = {}
    for key, values in ranges.items():
        if not isinstance(values, Drawn):
            found[key] = draw.choice(values)
            continue
        scale, low, high, is_whole = values
        ends = (math.log(low), math.log(high)) if scale == "log_uniform" else (low, high)
        value = draw.uniform(*ends)
        value = math.exp(value) if scale == "log_uniform" else value
        short = min(high, max(low, float(f"{value:.4g}")))
        found[key] = round(short) if is_whole else short
    return found


def _read(hint: Any, value: Any) -> Any:
    """A value of a key; YAML 1.1 reads 2e-4 as text, which a number's key does not mean."""
    if isinstance(value, str) and float in (hint, *get_args(hint)):
        with suppress(ValueError):
            return float(value)
    return value


def check_key(path: str, key: Any, metric: Metric) -> Any:
    """Returns the type of a job's key that trials may set, or refuses it."""
    section = str(key).partition(".")[0]
    is_refused = section in _NOT_SWEPT and (section != "preference" or metric == "eval_loss")
    if is_refused or (section == "preference" and str(key) == "preference.loss"):
        raise ConfigError(f"{path} must not set {section}: {_NOT_SWEPT[section]}")
    known = _keys(JobSpec)
    if key not in known:
        raise unknown(path, key, (name for name in known if name.split(".")[0] not in _NOT_SWEPT))
    return known[key]


def _keys(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The types of all keys of a section by dotted name, those of sections in it, too."""
    found: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        hint, name = hints[item.name], f"{prefix}{item.name}"
        is_union = get_origin(hint) in (Union, types.UnionType)
        options = get_args(hint) if is_union else (hint,)
        section = next(filter(is_dataclass, options), None)
        found |= {name: hint} if section is None else _keys(section, f"{name}.")
    return found


def settings_text(settings: Mapping[str, Any]) -> str:
    """A trial's settings in a line: `optimizer.lr 0.001, lora.rank 8`."""
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {show(value)}"
        for key, value in settings.items()
    )
