"""Requests for samples from a base with an adapter, their bounds, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

MOST_TOP_LOGPROBS = 20
"""Alternatives to a token that are told; OpenAI's limit."""
MOST_SAMPLES = 128
"""Sequences of one prompt; OpenAI's limit."""


def _check(name: str, rule: str, value: object, is_held: bool) -> None:
    if not is_held:
        raise ValueError(f"{name} must be {rule}, got {value}")


class TokenLogprob(NamedTuple):
    """A token and its log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when a sequence ends.

    Raises:
        ValueError: for a value out of its range.
    """

    max_tokens: int | None = None
    """None = while the base has positions and the sampler memory; 0 = score the prompt"""
    temperature: float = 1.0
    """0 = the likeliest token always"""
    top_k: int | None = None
    """None = all tokens"""
    top_p: float = 1.0
    seed: int | None = None
    """None = drawn for each request"""
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """beside the base's end-of-sequence tokens"""
    ignore_eos: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 0), ("top_k", 1)):
            value = getattr(self, name)
            _check(name, f"at least {least}", value, value is None or value >= least)
        _check("temperature", "between 0 and 100", self.temperature, 0 <= self.temperature <= 100)
        _check("top_p", "above 0 and at most 1", self.top_p, 0 < self.top_p <= 1)
        _check("stop", "texts that are not empty", list(self.stop), all(self.stop))
        most = MOST_TOP_LOGPROBS
        held = 0 <= self.top_logprobs <= most
        _check("top_logprobs", f"between 0 and {most}", self.top_logprobs, held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A prompt, and the sequences that are wanted from it.

    Raises:
        ValueError: for a value out of its range.
    """

    tokens: tuple[int, ...]
    adapter: str | None = None
    """absolute folder of a PEFT adapter; None = the base alone"""
    params: SamplingParams = SamplingParams()
    num_samples: int = 1
    prompt_logprobs: bool = False
    top_prompt_logprobs: int = 0

    def __post_init__(self) -> None:
        _check("prompt", "at least one token", "none", bool(self.tokens))
        held = 1 <= self.num_samples <= MOST_SAMPLES
        _check("num_samples", f"between 1 and {MOST_SAMPLES}", self.num_samples, held)
        most = MOST_TOP_LOGPROBS
        held = 0 <= self.top_prompt_logprobs <= most
        _check("top_prompt_logprobs", f"between 0 and {most}", self.top_prompt_logprobs, held)


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One sequence."""

    tokens: tuple[int, ...]
    """with the token that ended it"""
    logprobs: tuple[float, ...]
    """under the model itself: at temperature 1 and among all tokens"""
    stop_reason: StopReason
    text: str
    """without special tokens, and without the stop text"""
    stopped_by: int | str | None = None
    """the token or the text that ended it"""
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


TopLogprobs = tuple[TokenLogprob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Log-probabilities of a prompt's tokens, each under those before it."""

    logprobs: tuple[float | None, ...]
    """None for the first token"""
    top: tuple[TopLogprobs | None, ...] = ()
    """empty where none were asked for"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """News of one sequence of a call."""

    prompt: int
    """number of the prompt in the call"""
    sample: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    text: str = ""
    """may lag behind the tokens, where the next ones could change it"""
    stop_reason: StopReason | None = None
    """set in the sequence's last piece"""
    stopped_by: int | str | None = None
    scores: Scores | None = None
    """of the prompt, before its first token"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All that came of one prompt."""

    sequences: tuple[Sampled, ...]
    """none where max_tokens is 0"""
    prompt_logprobs: tuple[float | None, ...] | None = None
    top_prompt_logprobs: tuple[TopLogprobs | None, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerLimits:
    """The most that one sampling process takes."""

    adapters: int = 8
    """held at a time"""
    sequences: int = 128
    """that grow at a time"""
    step_tokens: int | None = None
    """new tokens of a step; None = 2048 on a CPU and 8192 on a GPU"""
    cache_bytes: int | None = None
    """memory of keys and values; None = 512 MB on a CPU, half of what a GPU has left"""


PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHECKPOINT_FILES = ("state.json", "adapter.safetensors")


class AdapterKey(NamedTuple):
    """A folder of an adapter with the files that it had: one that is written anew is another."""

    folder: str
    is_checkpoint: bool
    """True for a job's `checkpoints/step_N`, False for what PEFT loads."""
    files: tuple[tuple[int, int, int], ...]
    """inode, size and time of each"""

    @classmethod
    def of(cls, folder: str) -> AdapterKey:
        """Looks at a folder.

        Raises:
            ValueError: if it holds no adapter.
        """
        path = Path(folder)
        is_checkpoint = (path / CHECKPOINT_FILES[0]).is_file()
        names = CHECKPOINT_FILES if is_checkpoint else PEFT_FILES
        try:
            found = [(path / name).stat() for name in names]
        except OSError as error:
            raise ValueError(
                f"adapter must be a folder with {' and '.join(names)}, got {folder}: "
                f"{error.strerror}"
            ) from error
        files = tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)
        return cls(folder, is_checkpoint, files)
