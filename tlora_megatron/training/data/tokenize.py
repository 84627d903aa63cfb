"""Rows of a job's JSONL file to tokens and targets: the three formats, with the base's tokenizer.

A batch of rows is tokenized by one call; everything that can go wrong in a row names its line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

RowKind = Literal["completion", "messages", "text"]
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
"""Closed, because a chat template may pass over a misspelt role without a word."""

_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_KNOWN_CLASSES = {
    ("llama", "PreTrainedTokenizerFast"): "PreTrainedTokenizerFast",
    ("llama", "TokenizersBackend"): "PreTrainedTokenizerFast",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen2", "Qwen2TokenizerFast"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2TokenizerFast"): "Qwen2Tokenizer",
}
"""(model type, tokenizer class as the folder says) -> class that `AutoTokenizer` then takes."""
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]
"""Half-open range of characters."""


class Row(NamedTuple):
    """One checked line of a JSONL file."""

    kind: RowKind
    fields: dict[str, Any]
    where: str
    """Job, file and line number, for errors."""


class TokenSequence(NamedTuple):
    """One training sequence."""

    tokens: np.ndarray
    """`[n]` int32."""
    is_target: np.ndarray
    """`[n]` bool: token i is predicted from `tokens[:i]` and counts in the loss; False at 0."""


def fingerprint(sequences: Iterable[TokenSequence]) -> str:
    """Hexadecimal digest of tokens and targets, in order: what a resumed job must find again."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(len(sequence.tokens).to_bytes(8, "little"))
        digest.update(sequence.tokens.astype("<i4").tobytes())
        digest.update(sequence.is_target.tobytes())
    return digest.hexdigest()[:16]


def load_tokenizer(base_dir: Path) -> Any:
    """Loads a Hugging Face base directory's tokenizer from its files, running no code of theirs.

    Raises:
        ValueError: if the directory lacks tokenizer files or they cannot be read.
    """
    import transformers

    base_dir = Path(base_dir)
    # transformers builds an empty tokenizer, or asks its cache, where the files are missing.
    if not any(all((base_dir / f).is_file() for f in files) for files in _TOKENIZER_FILES):
        choices = " or ".join(" with ".join(files) for files in _TOKENIZER_FILES)
        raise ValueError(f"base_model must hold a tokenizer ({choices}), got none in {base_dir}")
    try:
        kind = _tokenizer_class(base_dir)
        if kind is not None:
            return getattr(transformers, kind).from_pretrained(base_dir, local_files_only=True)
        return transformers.AutoTokenizer.from_pretrained(
            base_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f"base_model must hold a readable tokenizer, got {error} in {base_dir}"
        ) from error


def _tokenizer_class(base_dir: Path) -> str | None:
    """The class that `AutoTokenizer` would find, where it is known; None: ask it.

    Asking imports all of transformers' models, and torch's compiler with them.
    """
    if not (base_dir / "tokenizer.json").is_file():
        return None
    model, tokenizer = (
        json.loads((base_dir / name).read_text(encoding="utf-8"))
        if (base_dir / name).is_file()
        else {}
        for name in ("config.json", "tokenizer_config.json")
    )
    if "auto_map" in tokenizer:
        return None
    return _KNOWN_CLASSES.get((model.get("model_type"), tokenizer.get("tokenizer_class")))


def tokenize_rows(rows: Sequence[Row], tokenizer: Any) -> list[TokenSequence]:
    """Tokens and targets of each row, in the rows' order.

    Raises:
        ValueError: if the chat template is missing, fails, or does not let assistant turns be told
            apart. A sequence without any target is returned as it is.
    """
    sequences: dict[int, TokenSequence] = {}
    for kind, tokenize in _TOKENIZE.items():
        picked = [index for index, row in enumerate(rows) if row.kind == kind]
        if picked:
            made = tokenize([rows[index] for index in picked], tokenizer)
            sequences.update(zip(picked, made, strict=True))
    return [sequences[index] for index in range(len(rows))]


def _completion_sequences(rows: Sequence[Row], tokenizer: Any) -> Iterable[TokenSequence]:
    prompts = _input_ids(tokenizer, [row.fields["prompt"] for row in rows])
    completions = _input_ids(
        tokenizer, [row.fields["completion"] for row in rows], add_special_tokens=False
    )
    # An EOS that the tokenizer appends would end the sequence before its completion.
    end = -1 if appends_eos(tokenizer) else None
    for prompt, completion in zip(prompts, completions, strict=True):
        prompt = prompt[:end]
        yield _sequence([*prompt, *completion, tokenizer.eos_token_id], num_context=len(prompt))


def _text_sequences(rows: Sequence[Row], tokenizer: Any) -> Iterable[TokenSequence]:
    for ids in _input_ids(tokenizer, [row.fields["text"] for row in rows]):
        yield _sequence(ids, num_context=1)


def _messages_sequences(rows: Sequence[Row], tokenizer: Any) -> Iterable[TokenSequence]:
    template = _chat_template(tokenizer, rows[0].where)
    has_generation_blocks = bool(_GENERATION_BLOCK.search(template))
    find = _generation_spans if has_generation_blocks else _prefix_spans
    chats = [find(row, tokenizer, template) for row in rows]
    encoded = tokenizer(
        [text for text, _ in chats],
        add_special_tokens=False,  # the template writes them
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    token_offsets = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    for (ids, offsets), (_, spans) in zip(token_offsets, chats, strict=True):
        sequence = _sequence(ids, num_context=len(ids))
        starts = _token_starts(offsets)
        for begin, end in spans:
            sequence.is_target[(starts >= begin) & (starts < end)] = True
        sequence.is_target[:1] = False
        yield sequence


_TOKENIZE: dict[RowKind, Callable[[Sequence[Row], Any], Iterable[TokenSequence]]] = {
    "completion": _completion_sequences,
    "messages": _messages_sequences,
    "text": _text_sequences,
}


def appends_eos(tokenizer: Any) -> bool:
    """True if the tokenizer's own special tokens end a text with EOS."""
    with_special, plain = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    eos = tokenizer.eos_token_id
    return with_special[-1:] == [eos] and plain[-1:] != [eos]


def _input_ids(
    tokenizer: Any, texts: list[str], add_special_tokens: bool = True
) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        verbose=False,  # length is judged by the job's max_seq_len, not the tokenizer's
    )
    return encoded["input_ids"]


def _sequence(ids: Sequence[int], *, num_context: int) -> TokenSequence:
    """Every token after the first `num_context` ones is a target, except the very first token."""
    is_target = np.ones(len(ids), dtype=bool)
    is_target[: max(num_context, 1)] = False
    return TokenSequence(np.asarray(ids, dtype=np.int32), is_target)


def _token_starts(offsets: Sequence[Span]) -> np.ndarray:
    """First character of each token, `[n]`.

    Byte-level tokenizers may trim white space off the offsets: a token of white space alone gets an
    empty range at its own end, so its start is where the token before it ends.
    """
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return np.where(begins < ends, begins, before)


def _chat_template(tokenizer: Any, where: str) -> str:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"messages must come with a tokenizer that reports offsets (tokenizer.json), "
            f"got {type(tokenizer).__name__}: {where}"
        )
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ValueError(
            f"messages must come with a tokenizer that has a chat template, got none: {where}"
        ) from error


@contextmanager
def _template_errors(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program and may raise anything
        raise ValueError(
            f"messages must suit the chat template, got {type(error).__name__}: {error}: {where}"
        ) from error


def _render(row: Row, tokenizer: Any, messages: list[Any], **options: Any) -> str:
    with _template_errors(row.where):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def _generation_spans(row: Row, tokenizer: Any, template: str) -> tuple[str, list[Span]]:
    """The conversation as text and what its template marks by `{% generation %}` blocks.

    `apply_chat_template(..., return_assistant_tokens_mask=True)` maps the same spans to tokens, but
    loses turns, or marks all that follows, where a span begins or ends with trimmed white space.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # As in apply_chat_template: a template would write out a key that is null.
    chat = [{k: v for k, v in m.items() if v is not None} for m in row.fields["messages"]]
    with _template_errors(row.where):
        (text,), (spans,) = render_jinja_template(
            [chat],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    return text, list(spans)


def _prefix_spans(row: Row, tokenizer: Any, template: str) -> tuple[str, list[Span]]:
    """The conversation as text and its assistant turns, each found between two shorter renderings.

    Turn k begins where the template asks for generation after the messages before it and ends
    where the rendering of the first k + 1 messages ends, so its end-of-turn token belongs to it.
    """
    messages = row.fields["messages"]
    text = _render(row, tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = _render(row, tokenizer, messages[:index], add_generation_prompt=True)
        answered = _render(row, tokenizer, messages[: index + 1])
        length = _turn_length(text, asked, answered, message["content"].strip())
        if length is None:
            raise ValueError(
                f"the chat template must extend the messages before an assistant turn when it adds "
                f"the turn, got another beginning at messages[{index}] (a template with generation "
                f"blocks marks the turns itself): {row.where}"
            )
        spans.append((len(asked), len(asked) + length))
    return text, spans


def _turn_length(text: str, asked: str, answered: str, content: str) -> int | None:
    """Characters of the turn that starts after `asked` in `text`; None if that is not certain."""
    if not (text.startswith(asked) and answered.startswith(asked)):
        return None
    if text.startswith(answered):
        return len(answered) - len(asked)
    # Qwen3 writes an empty think block into the last turn only: look for content and end of turn.
    at = answered.find(content, len(asked)) if content else -1
    while at >= 0:
        if text.startswith(answered[at:], len(asked)):
            return len(answered) - at
        at = answered.find(content, at + 1)
    return None
