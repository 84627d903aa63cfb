"""Turns a request for fine-tuning into an entry of `jobs`, and submits it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, StrictFloat, StrictInt, StrictStr

from tlora_megatron.config.documents import merge
from tlora_megatron.config.job import JobSpec, OptimizerSpec, PreferenceSpec
from tlora_megatron.config.reader import ConfigError, check_partial, nearest
from tlora_megatron.service.api.gate import ApiError, Caller, missing, refused
from tlora_megatron.service.api.openai.models import ADAPTER, find_model, split_model
from tlora_megatron.service.api.openai.objects import DOOR
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.api.submitting import submit
from tlora_megatron.service.prepare.submission import ASKED
from tlora_megatron.service.store import Job, NotFound

T = TypeVar("T", int, float)
AUTO_EPOCHS = 3
"""Passes over the data where a client says `auto`; all other defaults are those of a job."""
_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(JobSpec)}
AUTO_BATCH_SIZE: int = _DEFAULTS["batch_size"]
AUTO_LR: float = OptimizerSpec().lr
"""A `learning_rate_multiplier` multiplies this, or `tlora.optimizer.lr`."""
AUTO_BETA, AUTO_DPO_LR = PreferenceSpec().beta, 1e-5
"""Of jobs of pairs; the rate is that of tinker-cookbook's recipe."""
PREFIX = "tlora."
"""Keys of `metadata` that begin so set what the API has no field for."""
_SERVICE = ("gpus", "max_slowdown", "priority", "checkpoint_every_s")
_KEYS = (
    *("lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules", "lora.use_rslora"),
    *("lora.expert_rank", "lora.expert_sharing"),
    *("optimizer.lr", "optimizer.weight_decay", "optimizer.max_grad_norm"),
    *("schedule.name", "schedule.warmup_steps", "schedule.warmup_ratio", "schedule.min_lr"),
    *("max_seq_len", "max_steps", "eval_every_steps", "on_nonfinite"),
    *("data.overlong", "data.learn", "data.chat_template"),
    *("preference.loss", "preference.label_smoothing", "preference.margin"),
    "preference.sft_weight",
    *_SERVICE,
)
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_PAIRS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


class Hyperparameters(BaseModel):
    """The three numbers that the API knows; `auto` is what is left out."""

    model_config = ConfigDict(extra="forbid")

    n_epochs: StrictInt | Literal["auto"] | None = None
    batch_size: StrictInt | Literal["auto"] | None = None
    learning_rate_multiplier: StrictFloat | StrictInt | Literal["auto"] | None = None


class PairHyperparameters(Hyperparameters):
    """Those of the method `dpo`."""

    beta: StrictFloat | StrictInt | Literal["auto"] | None = None


_METHODS = {"supervised": Hyperparameters, "dpo": PairHyperparameters}


class Asked(BaseModel):
    """The body of a request for fine-tuning."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    training_file: StrictStr
    validation_file: StrictStr | None = None
    hyperparameters: Hyperparameters | None = None
    method: dict[str, Any] | None = None
    metadata: dict[StrictStr, StrictStr] | None = None
    suffix: StrictStr | None = None
    seed: StrictInt | None = None
    integrations: list[Any] | None = None

    @property
    def digest(self) -> str:
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Numbers(BaseModel):
    """Hyperparameters with every `auto` replaced."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None = None
    """None = the method is not `dpo`."""


def check_request(asked: Asked) -> None:
    """Refuses by name the first thing that a service cannot do."""
    if asked.integrations:
        raise refused("integrations", "be left out", asked.integrations, "metrics are in events")
    if asked.suffix is not None and not _SUFFIX.fullmatch(asked.suffix):
        rule = "be at most 64 letters, digits, dots, underscores and hyphens"
        raise refused("suffix", rule, asked.suffix)
    if asked.seed is not None and asked.seed < 0:
        raise refused("seed", "be at least 0", asked.seed)
    _check_metadata(asked.metadata or {})


def numbers_of(asked: Asked) -> Numbers:
    """The hyperparameters of a request, from whichever of their two places.

    Raises:
        ApiError: if the method is not known, or a value is out of range.
    """
    given, place = asked.hyperparameters, "hyperparameters"
    kind, inner = _method(asked.method)
    if inner is not None:
        if given is not None and given.model_dump() != inner.model_dump(
            include=set(given.__dict__)
        ):
            rule = f"be left out, or equal those of method.{kind}"
            raise refused("hyperparameters", rule, given.model_dump())
        given, place = inner, f"method.{kind}.hyperparameters"
    given = given or Hyperparameters()
    beta = getattr(given, "beta", None)
    return Numbers(
        n_epochs=_number(given.n_epochs, AUTO_EPOCHS, f"{place}.n_epochs"),
        batch_size=_number(given.batch_size, AUTO_BATCH_SIZE, f"{place}.batch_size"),
        learning_rate_multiplier=_number(
            given.learning_rate_multiplier, 1.0, f"{place}.learning_rate_multiplier"
        ),
        beta=_number(beta, AUTO_BETA, f"{place}.beta") if kind == "dpo" else None,
    )


class Start(NamedTuple):
    """What a job begins with."""

    base: str
    init_from: str | None = None
    """Of the adapter that it continues."""
    lora: Mapping[str, Any] = {}
    """The section of that adapter's job, of which only the dropout may change."""


def job_entry(
    asked: Asked, numbers: Numbers, start: Start, *, name: str, train: str, validation: str | None
) -> dict[str, Any]:
    """The entry of `jobs` that a checked request means.

    Raises:
        ConfigError: if a key of the metadata has a value that its setting cannot have.
    """
    settings = settings_of(asked.metadata or {})
    check_partial(JobSpec, settings, "metadata.tlora")
    for key, value in settings.get("lora", {}).items():
        if start.lora and key != "dropout" and value != start.lora[key]:
            raise refused(f"metadata.tlora.lora.{key}", f"be the model's {start.lora[key]}", value)
    pairs = {} if numbers.beta is None else {"preference": {"beta": numbers.beta}}
    if "preference" in settings and not pairs:
        raise refused("method.type", "be dpo with metadata.tlora.preference", "supervised")
    default_lr = AUTO_DPO_LR if pairs else AUTO_LR
    lr = float(settings.get("optimizer", {}).get("lr", default_lr))
    entry: dict[str, Any] = {
        "name": name,
        "data": {"train": train, "eval": validation},
        "init_from": start.init_from,
        "lora": start.lora,
        "batch_size": numbers.batch_size,
        "seed": asked.seed or 0,
        **pairs,
    }
    entry = merge(entry, settings)
    if "max_steps" not in settings:
        entry["epochs"] = numbers.n_epochs
    return merge(entry, {"optimizer": {"lr": lr * numbers.learning_rate_multiplier}})


def settings_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The settings that keys of the metadata make, as part of an entry of `jobs`."""
    settings: dict[str, Any] = {}
    for key, text in metadata.items():
        if key.startswith(PREFIX):
            path = key.removeprefix(PREFIX)
            path = f"service.{path}" if path in _SERVICE else path
            *parents, last = path.split(".")
            node = settings
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = _value(text, is_list=last == "target_modules")
    return settings


def _value(text: str, *, is_list: bool) -> Any:
    if is_list and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MOST_PAIRS:
        raise refused("metadata", f"have at most {_MOST_PAIRS} keys", len(metadata))
    for key, value in metadata.items():
        name = f"metadata.{key:.80}"
        if len(key) > _LONGEST_KEY:
            raise refused(name, f"have a key of at most {_LONGEST_KEY} characters", len(key))
        if len(value) > _LONGEST_VALUE:
            raise refused(name, f"have at most {_LONGEST_VALUE} characters", len(value))
        own = key.removeprefix(PREFIX)
        if key.startswith(PREFIX) and own not in _KEYS:
            hint = nearest(own, _KEYS) or f"keys of the service are {', '.join(_KEYS)}"
            raise ApiError(400, f"{name} is not a known key; {hint}", param="metadata")


def _method(method: Mapping[str, Any] | None) -> tuple[str, Hyperparameters | None]:
    """The kind of a method, and the hyperparameters that it holds."""
    if method is None:
        return "supervised", None
    kind = method.get("type")
    if not isinstance(kind, str) or kind not in _METHODS:
        remedy = "rewards are not trained here" if kind else ""
        raise refused("method.type", "be supervised or dpo", kind, remedy)
    others = [key for key in method if key not in ("type", kind)]
    if others and any(method[key] is not None for key in others):
        raise refused(f"method.{others[0]}", "be left out", method[others[0]])
    inner = method.get(kind) or {}
    extra = [key for key in inner if key != "hyperparameters"] if isinstance(inner, dict) else [""]
    if extra:
        raise refused(f"method.{kind}", "hold hyperparameters alone", inner)
    found = inner.get("hyperparameters")
    if found is None:
        return kind, None
    try:
        return kind, _METHODS[kind].model_validate(found)
    except ValueError:
        names = ", ".join(_METHODS[kind].model_fields)
        rule = f"hold {names}, numbers or auto"
        raise refused(f"method.{kind}.hyperparameters", rule, found) from None


def _number(given: Any, default: T, name: str) -> T:
    if given is None or given == "auto":
        return default
    is_whole = isinstance(default, int)
    if not (1 <= given < 2**31 if is_whole else 0 < given < 1e9):
        rule = "an integer of at least 1" if is_whole else "a number above 0"
        raise refused(name, f"be auto, or {rule}", given)
    return type(default)(given)


RETRIED_WITHIN_S = 600.0
"""A retry is answered with the job of the same body that is no older."""
_PLACE = re.compile(r"jobs\[0\]\.")
_REMEMBERED = ("model", "training_file", "validation_file", "suffix", "metadata")
_OWN_NAME = re.compile(r" \(job [^)]*\)")


class Submitting:
    """Makes jobs of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A retry waits for the request that it repeats: that may be at work still."""

    async def submit(
        self, asked: Asked, caller: Caller, *, is_retry: bool
    ) -> tuple[Job, dict[str, Any]]:
        """Submits a request's job, or finds it for a retry; with what is remembered of it."""
        numbers = numbers_of(asked)
        check_request(asked)
        start = await self._service.read(self._start, asked.model, caller)
        await self._service.read(self._check_files, asked, caller)
        async with self._turns.setdefault(f"{caller.tenant}/{_key(asked)}", asyncio.Lock()):
            known = await self._service.read(self._known, asked, caller) if is_retry else None
            return known or await self._submit(asked, numbers, start, caller)

    async def _submit(
        self, asked: Asked, numbers: Numbers, start: Start, caller: Caller
    ) -> tuple[Job, dict[str, Any]]:
        remembered = {
            "door": DOOR,
            "base": start.base,
            "seed": asked.seed or 0,
            "hyperparameters": numbers.model_dump(exclude_none=True),
            **{name: getattr(asked, name) for name in _REMEMBERED},
        }
        try:
            entry = job_entry(
                asked,
                numbers,
                start,
                name=f"{asked.suffix or 'ft'}-{secrets.token_hex(4)}",
                train=asked.training_file,
                validation=asked.validation_file,
            )
            document = {"base_model": start.base, "jobs": [entry]}
            key = f"{_key(asked)}{uuid.uuid4().hex}"
            accepted = await submit(self._service, caller, document, key=key, asked=remembered)
        except ConfigError as error:
            raise ApiError(400, _OWN_NAME.sub("", _PLACE.sub("", str(error)))) from error
        return accepted.jobs[0], remembered

    def _known(self, asked: Asked, caller: Caller) -> tuple[Job, dict[str, Any]] | None:
        """The job that a retry asks for, if its first request arrived."""
        jobs = self._service.store.jobs
        known = jobs.newest_of_key(_key(asked), tenant=caller.tenant, within_s=RETRIED_WITHIN_S)
        return None if known is None else (known, jobs.document(known.id)[ASKED])

    def _check_files(self, asked: Asked, caller: Caller) -> None:
        """Refuses a file that is not there, in the name of the request's field."""
        for name in ("training_file", "validation_file"):
            file = getattr(asked, name)
            try:
                if file is not None:
                    self._service.store.uploads.get(file, tenant=caller.tenant)
            except (NotFound, UnicodeEncodeError):
                error = missing(name, file)
                error.status, error.param = 400, name
                raise error from None

    def _start(self, model: str, caller: Caller) -> Start:
        """What the name of a base, or of a model that was trained here, stands for."""
        bases, name = self._service.bases(), split_model(model)
        if model in bases:
            return Start(model)
        if name.job is None:
            known = f"{', '.join(bases) or 'none'}, and the models that it has trained (ft:...)"
            hint = nearest(model, bases) or f"the service offers {known}"
            error = refused("model", "be a base of the service", model, hint)
            error.code = "model_not_found"
            raise error
        try:
            found = find_model(self._service, caller, model)
        except ApiError as error:
            error.status = 400
            raise
        if name.step is not None:
            remedy = "a checkpoint goes on as resume_from of a native job"
            raise refused("model", "be of a whole job", model, remedy)
        if found.base not in bases:
            raise refused("model", "be over a base that the service offers", model)
        document = self._service.store.jobs.document(name.job)["document"]
        return Start(found.base, f"jobs/{name.job}/{ADAPTER}", document["lora"])


def _key(asked: Asked) -> str:
    """The beginning of the keys of all requests with this body."""
    return f"{DOOR}/{asked.digest}/"
