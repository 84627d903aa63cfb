"""What clients ask of their jobs, and how a loop hears of it and answers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Op = Literal[
    "forward_backward",
    "forward",
    "optim_step",
    "save_state",
    "load_state",
    "save_for_sampler",
    "leave",
]
"""The requests of a client; docs/tinker.md says what each does."""
OPS: tuple[Op, ...] = get_args(Op)
Category = Literal["user", "server"]
"""Who can mend what went wrong."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STATE_PATH = re.compile(r"jobs/j[0-9a-z]{1,31}/states/[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RequestError(ValueError):
    """A request that cannot be carried out, in a sentence for its client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The settings of a loss over log-probabilities."""

    needs: tuple[str, ...] = ()
    """Arrays, one number a token."""
    may_have: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)
    """Settings with their defaults; None = there is none, so it must be given."""


_CLIPS = ("clip_low_threshold", "clip_high_threshold")
_SAMPLED = ("logprobs", "advantages")

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(may_have=("weights",)),
    "importance_sampling": Loss(needs=_SAMPLED),
    "ppo": Loss(needs=_SAMPLED, may_have=_CLIPS, config=dict(zip(_CLIPS, (0.8, 1.2), strict=True))),
    "cispo": Loss(
        needs=_SAMPLED, may_have=_CLIPS, config=dict(zip(_CLIPS, (0.0, 4.0), strict=True))
    ),
    "dro": Loss(needs=_SAMPLED, config={"beta": None}),
    "gspo": Loss(
        needs=(*_SAMPLED, "sequence_ratio_mask"),
        config=dict(zip(_CLIPS, (1 - 3e-4, 1 + 4e-4), strict=True)),
    ),
    "stable_reinforce": Loss(needs=_SAMPLED),
}
"""The losses by the names and with the defaults of Tinker's documentation; the clips of `gspo` are
its paper's."""
UNKNOWN_LOGPROB = -1e4
"""Under `stable_reinforce`, of a token whose log-probability in sampling is not known."""

SAMPLED_STEPS = "sampled_steps"
"""Parameter of a pass: `step` of the job at the versions that its samples are known to be from."""


class AdamParams(NamedTuple):
    """The parameters of one optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest 2-norm of the whole adapter's gradient; 0 = no clipping."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """One thing that a client asks."""

    op: Op
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of JSON."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """For `forward_backward` and `forward`: `lengths` int32 `[n]`, `tokens` int32 `[T]`, `targets`
    int64 `[T]`, and float32 `[T]` what the loss takes; the sequences one behind the other."""

    @property
    def has_sequences(self) -> bool:
        """True if it runs sequences through the model."""
        return self.op in ("forward_backward", "forward")

    @property
    def loss_fn(self) -> str:
        """Name of its loss."""
        return str(self.params.get("loss_fn", "cross_entropy"))

    @property
    def runs(self) -> Sequence[int]:
        """Sequences of each datum, which differ in their targets; they are neighbours."""
        found: Sequence[int] = self.params.get("runs") or [1] * len(self.arrays["lengths"])
        return found

    @property
    def weights(self) -> np.ndarray:
        """Weights of its tokens; 1 each where it has none."""
        return self.arrays.get("weights", np.ones(len(self.arrays["tokens"]), np.float32))

    def loss_config(self) -> dict[str, float]:
        """The settings of its loss, with defaults."""
        given: Mapping[str, Any] = self.params.get("loss_fn_config") or {}
        defaults = LOSSES[self.loss_fn].config
        return {key: float(given.get(key, value)) for key, value in defaults.items()}

    def adam(self) -> AdamParams:
        """The parameters of its optimizer step, with defaults."""
        return AdamParams(**{key: float(value) for key, value in self.params.items()})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """The answer to a client's request."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of JSON."""
    logprobs: np.ndarray | None = None
    """float32 `[T]`: of every target, in the order of the request."""
    lengths: np.ndarray | None = None
    """int32 `[n]` of the request's sequences; the journal adds them to an answer with `logprobs`,
    which may outlive its request."""
    error: str | None = None
    """Why nothing has been done; None = it has."""
    category: Category | None = None
    """Category of the error."""


def check_request(
    request: Request, *, vocab_size: int | None = None, longest: int | None = None
) -> None:
    """Refuses a request that cannot be carried out.

    Args:
        vocab_size: tokens of the base; None = not looked at.
        longest: positions of a sequence, at most; None = not looked at.
    """
    if request.op not in OPS:
        raise _must("op", f"be among {', '.join(OPS)}", request.op)
    if request.has_sequences:
        _check_loss(request)
        _check_arrays(request)
        _check_base(request, vocab_size, longest)
        return
    if request.arrays:
        raise _must(f"arrays of {request.op}", "be left out", sorted(request.arrays))
    _PARAMS[request.op](request)


def _must(name: str, rule: str, value: object) -> RequestError:
    return RequestError(f"{name} must {rule}, got {value!r:.200}")


def _known(request: Request, known: tuple[str, ...]) -> None:
    for key in request.params:
        if key not in known:
            among = f"be among {', '.join(known)}" if known else "be left out"
            raise _must(f"parameters of {request.op}", among, key)


def _check_loss(request: Request) -> None:
    _known(request, ("loss_fn", "loss_fn_config", "runs", SAMPLED_STEPS))
    steps = request.params.get(SAMPLED_STEPS, [])
    if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
        raise _must(SAMPLED_STEPS, "be whole numbers", steps)
    loss = LOSSES.get(request.loss_fn)
    if loss is None:
        raise _must("loss_fn", f"be among {', '.join(LOSSES)}", request.loss_fn)
    config = request.params.get("loss_fn_config") or {}
    if not isinstance(config, Mapping):
        raise _must("loss_fn_config", "be a mapping", config)
    for key, value in config.items():
        if key not in loss.config:
            takes = f"be among {', '.join(loss.config)}" if loss.config else "be left out"
            raise _must(f"loss_fn_config of {request.loss_fn}", takes, key)
        _finite(f"loss_fn_config[{key!r}]", value)
    for key, default in loss.config.items():
        if default is None and key not in config:
            raise _must(f"loss_fn_config of {request.loss_fn}", f"hold {key}", dict(config))
    settings = request.loss_config()
    low, high = (settings.get(key, 0.0) for key in _CLIPS)
    if not 0 <= low <= high:
        raise _must("clip thresholds", "ascend from 0", (low, high))
    if settings.get("beta", 0.0) < 0:
        raise _must("beta", "be at least 0", settings["beta"])


def _check_arrays(request: Request) -> None:
    arrays, loss = request.arrays, LOSSES[request.loss_fn]
    needed = ("lengths", "tokens", "targets", *loss.needs)
    for name in needed:
        if name not in arrays:
            raise RequestError(f"{request.loss_fn} must have {name} for every token, got none")
    for name in arrays:
        if name not in (*needed, *loss.may_have):
            takes = f"take {', '.join((*loss.needs, *loss.may_have)) or 'nothing'} beside targets"
            raise _must(request.loss_fn, takes, name)
    lengths = arrays["lengths"]
    _check_kind("lengths", lengths, "i")
    if not len(lengths) or int(lengths.min()) < 1:
        raise _must("sequences", "hold at least one token each", lengths.tolist()[:8])
    _check_runs(request.runs, lengths.tolist())
    total = int(lengths.astype(np.int64).sum())
    for name, array in arrays.items():
        if name == "lengths":
            continue
        _check_kind(name, array, "i" if name in ("tokens", "targets") else "f")
        if len(array) != total:
            raise _must(name, f"have one value for each of {total} tokens", len(array))


def _check_runs(runs: object, lengths: list[int]) -> None:
    if not isinstance(runs, list) or not all(isinstance(one, int) and one > 0 for one in runs):
        raise _must("runs", "be whole numbers above 0", runs)
    left = iter(lengths)
    alike = [len(set(itertools.islice(left, one))) == 1 for one in runs]
    if not all(alike) or sum(runs) != len(lengths):
        raise _must("runs", "be those of data with sequences of one length each", runs)


def _check_kind(name: str, array: np.ndarray, kind: str) -> None:
    if array.ndim != 1 or array.dtype.kind != kind:
        what = "whole numbers" if kind == "i" else "floats"
        shape = f"{array.dtype} {list(array.shape)}"
        raise RequestError(f"{name} must be {what} in one dimension, got {shape}")
    if kind == "f" and not np.isfinite(array).all():
        where = int(np.flatnonzero(~np.isfinite(array))[0])
        raise RequestError(f"{name} must be finite, got {array[where]} at token {where}")


def _check_base(request: Request, vocab_size: int | None, longest: int | None) -> None:
    most = int(request.arrays["lengths"].max())
    if longest is not None and most > longest:
        raise _must("a sequence", f"have at most {longest} tokens here", most)
    for name in ("tokens", "targets"):
        low, high = int(request.arrays[name].min()), int(request.arrays[name].max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            end = "" if vocab_size is None else f" and below {vocab_size}, the vocabulary"
            raise _must(name, f"be at least 0{end}", low if low < 0 else high)


def _check_adam(request: Request) -> None:
    _known(request, AdamParams._fields)
    for key, value in request.params.items():
        _finite(key, value)
    adam = request.adam()
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(adam, key) < 1:
            raise _must(key, "be in [0, 1)", getattr(adam, key))
    for key in ("learning_rate", "eps", "weight_decay"):
        if getattr(adam, key) < 0:
            raise _must(key, "be at least 0", getattr(adam, key))


def _finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _must(name, "be a finite number", value)


def _check_save(request: Request) -> None:
    _known(request, ("name", "overwrite", "only_sampled"))
    name, overwrite = request.params.get("name"), request.params.get("overwrite", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _must("name", "be letters, digits, '.', '_' and '-', 128 at most", name)
    if not isinstance(overwrite, bool):
        raise _must("overwrite", "be true or false", overwrite)


def _check_load(request: Request) -> None:
    _known(request, ("path", "optimizer"))
    path, optimizer = request.params.get("path"), request.params.get("optimizer", True)
    if not isinstance(path, str) or not _STATE_PATH.fullmatch(path):
        raise _must("path", "be jobs/ID/states/NAME as save_state answers it", path)
    if not isinstance(optimizer, bool):
        raise _must("optimizer", "be true or false", optimizer)


_PARAMS = {
    "optim_step": _check_adam,
    "save_state": _check_save,
    "save_for_sampler": _check_save,
    "load_state": _check_load,
    "leave": lambda request: _known(request, ()),
}


class Clients:
    """The requests of all driven jobs, by the jobs' names and by number from 1.

    This one has none, for a loop without such jobs.
    """

    def has_request(self, job: str, number: int) -> bool:
        """True if the request is there; asked on the first rank, many times a second."""
        return False

    def is_answered(self, job: str, number: int) -> bool:
        """True if it was answered, maybe by somebody before; asked on the first rank."""
        return False

    def read(self, job: str, number: int) -> Request:
        """Reads a request that the first rank has seen; every rank does.

        Raises:
            RequestError: if it is damaged: the same on every rank.
        """
        raise AssertionError("nobody has asked")

    def answer(self, job: str, number: int, answer: Answer) -> None:
        """Has a request answered, unless it was before; on the first rank. Does not wait."""

    def flush(self, job: str | None) -> None:
        """Waits until the answers so far are on the disk; any thread of the first rank.

        Args:
            job: None = those of all.
        """

    def covered(self, job: str, number: int) -> None:
        """Hears that a checkpoint counts all requests up to a number; on the first rank."""

    def state_folder(self, path: str) -> Path:
        """The folder of a state that `save_state` answered as `path`."""
        raise AssertionError("nobody has asked")
