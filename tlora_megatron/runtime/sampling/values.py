"""What is asked of a sampler, its bounds, and what comes back: tokens, and text while it grows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

MOST_TOP_LOGPROBS = 20
"""Alternatives to a token that are told; OpenAI's limit."""
MOST_SAMPLES = 128
"""Sequences of one prompt; OpenAI's limit."""


def _check(name: str, rule: str, value: object, is_held: bool) -> None:
    if not is_held:
        raise ValueError(f"{name} must be {rule}, got {value}")


class TokenLogprob(NamedTuple):
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
    presence_penalty: float = 0.0
    """taken from the logit of every token that the sequence has generated"""
    frequency_penalty: float = 0.0
    """taken from it as often as the token was generated"""
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
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, "between -2 and 2", value, -2 <= value <= 2)
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
    targets: tuple[tuple[int, ...], ...] = ()
    """tokens to score in the place of each of the prompt's but the first; empty = none"""

    def __post_init__(self) -> None:
        _check("prompt", "at least one token", "none", bool(self.tokens))
        rows = len(self.targets)
        _check("targets", "of each token but the first", rows, rows in (0, len(self.tokens) - 1))
        held = 1 <= self.num_samples <= MOST_SAMPLES
        _check("num_samples", f"between 1 and {MOST_SAMPLES}", self.num_samples, held)
        most = MOST_TOP_LOGPROBS
        held = 0 <= self.top_prompt_logprobs <= most
        _check("top_prompt_logprobs", f"between 0 and {most}", self.top_prompt_logprobs, held)


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
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
    targets: tuple[tuple[float, ...], ...] = ()
    """of the prompt's targets"""


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
    target_logprobs: tuple[tuple[float, ...], ...] = ()


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


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoders give it for the first bytes of a character."""
_TAIL = 8
"""Tokens that tell how a text ends: they hold four bytes, the longest character, and to spare."""


class Grown(NamedTuple):
    """The text that a token added, and the stop text that it completed."""

    text: str
    """that no further token can change or cut off"""
    stop: str | None
    """the stop text that the sequence now holds"""


class TextStream:
    """Decodes tokens as they come.

    A token's text may depend on the one before it (a space, the rest of a character), so tokens are
    decoded together with those of the piece before. Of a run of bytes that are no characters only
    the last tokens are decoded, until they end in a character: a text costs as much as it has
    tokens.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._begin, self._read, self._before = 0, 0, ""
        """Tokens from the first on are decoded together; the text up to the second is known."""
        self._held = ""
        """Known text that may be the beginning of a stop text."""

    def add(self, token: int) -> Grown:
        """Takes the next token."""
        self._tokens.append(token)
        text = self._finished()
        if text is None:
            # Decoders leave some tokens out; a lone space, which some cut off, comes twice.
            if not self._decode([token, token]):
                self._tokens.pop()
            return Grown("", None)
        return self._pass_on(self._held + text)

    def end(self) -> Grown:
        """Takes the end of the sequence: nothing is held back any more."""
        now = self._decode(self._tokens[self._begin :])
        grown = self._pass_on(self._held + now[len(self._before) :])
        held, self._held = self._held, ""
        return Grown(grown.text + held, grown.stop)

    def _finished(self) -> str | None:
        """Takes the text behind what is known, if it ends in a whole character."""
        if len(self._tokens) - self._read > _TAIL:
            # All of them ended in the middle of a character, so what they begin with is no matter.
            tail = self._decode(self._tokens[-_TAIL:])
            if tail.endswith(_UNFINISHED):
                return None
        now = self._decode(self._tokens[self._begin :])
        if len(now) <= len(self._before) or now.endswith(_UNFINISHED):
            return None
        found = now[len(self._before) :]
        self._begin, self._read = self._read, len(self._tokens)
        self._before = self._decode(self._tokens[self._begin :])
        return found

    def _pass_on(self, text: str) -> Grown:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, stop = min(found)
            self._held = ""
            return Grown(text[:at], stop)
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return Grown(text[: len(text) - kept], None)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def _overlap(text: str, stop: str) -> int:
    """The longest end of a text that is the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def gather(prompts: Sequence[Prompt], pieces: Iterable[Piece]) -> list[Answer]:
    """Returns one answer a prompt, in their order; all pieces of a call must be there."""
    scores: dict[int, Scores] = {}
    parts: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        if piece.scores is not None:
            scores[piece.prompt] = piece.scores
        else:
            parts.setdefault((piece.prompt, piece.sample), []).append(piece)
    answers = []
    for number, prompt in enumerate(prompts):
        wanted = prompt.num_samples if prompt.params.max_tokens != 0 else 0
        own = scores.get(number)
        answers.append(
            Answer(
                sequences=tuple(joined(parts[number, sample]) for sample in range(wanted)),
                prompt_logprobs=own.logprobs if own and prompt.prompt_logprobs else None,
                top_prompt_logprobs=own.top if own and prompt.top_prompt_logprobs else None,
                target_logprobs=own.targets if own else (),
            )
        )
    return answers


def merged(pieces: Sequence[Piece]) -> Piece:
    """One piece of all those of a sequence."""
    return replace(
        pieces[-1],
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        text="".join(piece.text for piece in pieces),
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )


def joined(pieces: Sequence[Piece]) -> Sampled:
    """A sequence of all its pieces."""
    one = merged(pieces)
    assert one.stop_reason is not None, "a sequence has an end"
    names = ("tokens", "logprobs", "stop_reason", "text", "stopped_by", "top_logprobs")
    return Sampled(**{name: getattr(one, name) for name in names})
