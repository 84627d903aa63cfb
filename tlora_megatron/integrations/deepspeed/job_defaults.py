"""Defaults of jobs: DeepSpeed's optimizer, scheduler and clipping, and a trainer's arguments.

For each value the first of these that has one decides: the job, `tlora.defaults`, DeepSpeed's keys
around the section, the trainer's argument, this package. An argument that nobody has set counts
where "auto" asks for it, in DeepSpeed's keys or in the section. A set one that DeepSpeed's keys
contradict is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tlora_megatron.config.reader import ConfigError, must, show

_ALTERNATIVES = (("max_steps", "epochs"), ("schedule.warmup_steps", "schedule.warmup_ratio"))
"""Keys of which a job has one; the other then comes from nowhere."""
AUTO = "auto"
"""The word in place of a value that the trainer's arguments decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerValue:
    """A value for a key of the job file, from one argument of a trainer."""

    argument: str
    value: Any
    is_set: bool
    """False for the argument's own default, which counts only where "auto" asks for it."""
    fills: bool = False
    """True if it counts wherever a job says nothing, since this package has no default."""
    needs: str = ""
    """The job's key without which it would mean nothing."""
    problem: str = ""
    """Why no job can have it; refused only if one would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerValues:
    """A trainer's arguments by the dotted keys of the job file that they mean."""

    job: Mapping[str, TrainerValue]
    """Keys of a job, such as `optimizer.lr`."""
    run: Mapping[str, TrainerValue]
    """Keys of the section `run`."""
    bf16: bool = False


@dataclass(kw_only=True, slots=True)
class _Origins:
    """Which job has taken a value from where; becomes one sentence."""

    taken: dict[str, str] = field(default_factory=dict)
    own: dict[str, list[str]] = field(default_factory=dict)
    from_json: dict[str, None] = field(default_factory=dict)
    """Keys in the order of their first job, as `ours`."""
    ours: dict[str, None] = field(default_factory=dict)

    def sentence(self) -> str:
        """Says where the jobs' values come from; empty if nothing is worth saying."""
        parts = []
        if self.taken:
            jobs = {name: f" (not {', '.join(own)})" for name, own in self.own.items()}
            said = (f"{text}{jobs.get(name, '')}" for name, text in self.taken.items())
            parts.append(f"from TrainingArguments {', '.join(said)}")
        if self.from_json:
            parts.append(f"from DeepSpeed's keys {', '.join(self.from_json)}")
        if self.ours:
            remark = '"auto" would take TrainingArguments\''
            parts.append(f"this package's own {', '.join(self.ours)} ({remark})")
        return f"what jobs do not say: {'; '.join(parts)}" if parts else ""


def hand_over(
    section: dict[str, Any],
    from_json: Mapping[str, Any],
    asked: Iterable[str],
    values: TrainerValues,
) -> list[str]:
    """Writes the arguments' values into the section's jobs and `run`, where they count.

    Args:
        section: the `tlora` section; changed in place.
        from_json: job fields that DeepSpeed's own keys set, nested like a job.
        asked: dotted job keys that DeepSpeed's own keys leave to the trainer by "auto".

    Returns:
        A sentence that says which value came from where.

    Raises:
        ConfigError: for an argument that contradicts DeepSpeed's keys, or that no job can have.
    """
    asked_of_all = {*asked, *_take_autos(section, "defaults", values.job)}
    defaults = section.get("defaults", {})
    origins = _Origins()
    for key, value in values.job.items():
        said = _find(from_json, key)
        if value.is_set and said is not None and said != value.value:
            rule = f"agree with DeepSpeed's keys, where {key} is {show(said)}"
            remedy = 'give it once, and "auto" in the other place'
            raise must(f"TrainingArguments.{value.argument}", rule, value.value, remedy)
    for entry in _jobs(section):
        asked_here = _take_autos({"job": entry}, "job", values.job)
        for key, value in values.job.items():
            if value.needs and not (_has(entry, [value.needs]) or _has(defaults, [value.needs])):
                continue
            keys = _alternatives(key)
            is_asked = not asked_here.isdisjoint(keys)
            if not is_asked and (_has(entry, keys) or _has(defaults, keys)):
                if value.is_set:
                    origins.own.setdefault(value.argument, []).append(_name(entry))
            elif not is_asked and _has(from_json, keys):
                origins.from_json[key] = None
            elif is_asked or value.is_set or value.fills or not asked_of_all.isdisjoint(keys):
                _take(entry, key, value, origins)
            else:
                origins.ours[key] = None
    _fill_run(section, values.run, origins)
    told = origins.sentence()
    return [told] if told else []


def refuse_autos(section: dict[str, Any]) -> None:
    """Refuses an "auto" that only a trainer could fill in."""
    places = [("defaults", section.get("defaults"))]
    places += [(f"jobs.{_name(entry)}", entry) for entry in _jobs(section)]
    for place, content in places:
        for path in _paths_of_auto(content, place):
            remedy = '"auto" means TrainingArguments, which MultiLoRATrainer alone has'
            raise must(path, "be a value", AUTO, remedy)


def _take(entry: dict[str, Any], key: str, value: TrainerValue, origins: _Origins) -> None:
    if value.problem:
        raise ConfigError(
            f"{value.problem}: job {_name(entry)} would take it, having no {key} of its own"
        )
    _set(entry, key, value.value)
    origins.taken[value.argument] = f"{value.argument} {show(value.value)}"


def _fill_run(
    section: dict[str, Any], values: Mapping[str, TrainerValue], origins: _Origins
) -> None:
    asked = _take_autos(section, "run", values)
    run = section.setdefault("run", {})
    if not isinstance(run, dict):
        return  # the reader refuses it
    for key, value in values.items():
        if key in asked or (value.is_set and key not in run):
            if value.problem:
                raise ConfigError(f"{value.problem}: run.{key} is not given")
            run[key] = value.value
            origins.taken[key] = f"{value.argument} (run.{key} {show(value.value)})"


def _jobs(section: dict[str, Any]) -> list[dict[str, Any]]:
    """The job entries that are mappings; the reader refuses others."""
    entries = section.get("jobs")
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name", "without a name"))


def _alternatives(key: str) -> tuple[str, ...]:
    return next((group for group in _ALTERNATIVES if key in group), (key,))


def _take_autos(
    holder: dict[str, Any], name: str, values: Mapping[str, TrainerValue]
) -> frozenset[str]:
    """Removes each "auto" below `holder[name]` that stands for one of the values.

    Returns:
        Dotted keys of the values it stood for.
    """
    content = holder.get(name)
    if content == AUTO:
        holder[name] = {}
        return frozenset(values)
    if not isinstance(content, dict):
        return frozenset()
    taken: set[str] = set()
    for path in _paths_of_auto(content, ""):
        meant = {k for k in values for a in _alternatives(k) if f"{a}.".startswith(f"{path}.")}
        if meant:
            _remove(content, path)
            taken |= meant
    return frozenset(taken)


def _paths_of_auto(content: Any, path: str) -> list[str]:
    """Dotted keys below a value whose value is "auto"."""
    if content == AUTO:
        return [path]
    if not isinstance(content, dict):
        return []
    below = ((f"{path}.{key}" if path else str(key), value) for key, value in content.items())
    return [found for key, value in below for found in _paths_of_auto(value, key)]


def _find(content: Any, key: str) -> Any:
    for part in key.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def _has(content: Any, keys: Iterable[str]) -> bool:
    """True if one of the keys is given; null is a value but for the two ends of a job."""
    for key in keys:
        group, _, last = key.rpartition(".")
        inner = _find(content, group) if group else content
        if isinstance(inner, Mapping) and last in inner:
            is_no_end = inner[last] is None and key in _ALTERNATIVES[0]
            if not is_no_end:
                return True
    return False


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for part in parents:
        inner = content.setdefault(part, {})
        if not isinstance(inner, dict):
            return  # the reader refuses it
        content = inner
    content[last] = value


def _remove(content: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        content = content[part]
    del content[last]


_ADAM = ("Adam", "AdamW")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "fused")
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
_SCHEDULE_KEYS = ("warmup_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_type")
_LR = "optimizer.lr"


def take_job_defaults(
    document: dict[str, Any],
) -> tuple[dict[str, Any], frozenset[str], list[str]]:
    """Returns the job fields that a DeepSpeed config sets, or leaves to a trainer, for all jobs.

    Returns:
        Fields nested like a job; the dotted fields that are "auto", which a trainer's arguments
        decide, else this package; and a sentence for each key taken.

    Raises:
        ConfigError: for an optimizer or scheduler that a job cannot have.
    """
    fields: dict[str, Any] = {}
    changes = []
    if "optimizer" in document:
        fields |= _adam(document["optimizer"])
        changes.append("optimizer is the jobs' default: each job has its own AdamW")
    if "gradient_clipping" in document:
        fields["optimizer.max_grad_norm"] = document["gradient_clipping"]
        changes.append(
            "gradient_clipping is the jobs' default optimizer.max_grad_norm: each is clipped by "
            "its own norm"
        )
    if "scheduler" in document:
        fields |= _schedule(document["scheduler"], fields)
        changes.append("scheduler is the jobs' default schedule: each counts its own steps")
    asked = frozenset(key for key, value in fields.items() if value == AUTO)
    nested: dict[str, Any] = {}
    for key, value in fields.items():
        if value != AUTO:
            _set(nested, key, value)
    return nested, asked, changes


def _type_and_params(name: str, section: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(section, dict):
        raise must(name, "be a mapping of type and params", section)
    params = section.get("params", {})
    if not isinstance(params, dict):
        raise must(f"{name}.params", "be a mapping", params)
    return section.get("type"), dict(params)


def _adam(section: Any) -> dict[str, Any]:
    kind, params = _type_and_params("optimizer", section)
    if kind not in _ADAM:
        raise must("optimizer.type", f"be one of {', '.join(_ADAM)}", kind)
    if kind == "Adam" and not params.get("adam_w_mode", True) and params.get("weight_decay"):
        raise must("optimizer.params.adam_w_mode", "be true: weight decay is decoupled", False)
    for key in _WITHOUT_EFFECT:
        params.pop(key, None)
    for key in params:
        if key not in _ADAM_KEYS:
            raise ConfigError(
                f"optimizer.params must be among {', '.join(_ADAM_KEYS)}, got {key!r}"
            )
    return {f"optimizer.{key}": value for key, value in params.items()}


def _schedule(section: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that a scheduler sets; a WarmupLR that is "auto" throughout says nothing of its own.

    Without warm-up, which is what "auto" means unless a trainer says otherwise, that is a constant
    rate.
    """
    kind, params = _type_and_params("scheduler", section)
    if not isinstance(kind, str) or kind not in _SCHEDULES:
        raise must(
            "scheduler.type",
            f"be one of {', '.join(_SCHEDULES)}",
            kind,
            "or give tlora.defaults.schedule",
        )
    params.pop("total_num_steps", None)  # a job's own number of steps
    for key in params:
        if key not in _SCHEDULE_KEYS:
            raise ConfigError(
                f"scheduler.params must be among {', '.join(_SCHEDULE_KEYS)}, got {key!r}"
            )
    if _is_left_open(params):
        params["warmup_type"] = "linear"
    if params.get("warmup_type", "log") != "linear":
        raise must(
            "scheduler.params.warmup_type", "be linear", params.get("warmup_type", "log (default)")
        )
    if params.get("warmup_min_lr", 0) not in (0, AUTO):
        raise must("scheduler.params.warmup_min_lr", "be 0", params["warmup_min_lr"])
    if "warmup_num_steps" not in params:
        remedy = "DeepSpeed's own default is 1000"
        raise must("scheduler.params.warmup_num_steps", "be given", None, remedy)
    found = {"schedule.warmup_steps": params["warmup_num_steps"]}
    if "warmup_max_lr" in params and (params["warmup_max_lr"] != AUTO or _LR not in fields):
        found[_LR] = params["warmup_max_lr"]
    if _SCHEDULES[kind] != "constant" or not _is_left_open(params):
        found["schedule.name"] = _SCHEDULES[kind]
    return found


def _is_left_open(params: dict[str, Any]) -> bool:
    """True if the warm-up's length is "auto", and its shape is not said to be another."""
    return params.get("warmup_num_steps") == AUTO and params.get("warmup_type") in (
        None, AUTO, "linear",
    )  # fmt: skip
