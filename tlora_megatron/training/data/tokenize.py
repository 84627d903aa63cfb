"""Rows of a job's JSONL file to tokens and targets, and prompts to the same tokens.

A batch of rows is tokenized by one call; everything that can go wrong in a row names its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tlora_megatron.training.data.chats import ChatWriter, Span, Written
from tlora_megatron.training.data.rows import Row, RowKind, read_messages

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
_END_FILES = ("generation_config.json", "config.json")


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


def tokenize_rows(
    rows: Sequence[Row], tokenizer: Any, template: str | None = None
) -> list[TokenSequence]:
    """Tokens and targets of each row, in the rows' order.

    Args:
        template: chat template instead of the tokenizer's.

    Raises:
        ValueError: if the chat template is missing, fails, or does not let assistant turns be told
            apart. A sequence without any target is returned as it is.
    """

    def chats(rows: Sequence[Row], tokenizer: Any) -> list[TokenSequence]:
        fields, wheres = [row.fields for row in rows], [row.where for row in rows]
        return tokenize_chats(fields, tokenizer, wheres, template)

    ways: dict[RowKind, Callable[[Sequence[Row], Any], Iterable[TokenSequence]]] = {
        "completion": _completion_sequences,
        "messages": chats,
        "text": _text_sequences,
    }
    sequences: dict[int, TokenSequence] = {}
    for kind, tokenize in ways.items():
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


def tokenize_chats(
    chats: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    wheres: Sequence[str],
    template: str | None = None,
) -> list[TokenSequence]:
    """Tokens of conversations as `read_chat` returns them; targets are answers of weight 1.

    Args:
        wheres: job, file and line of each, for errors.
        template: chat template instead of the tokenizer's.

    Raises:
        ValueError: as `tokenize_rows` does.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"messages must come with a tokenizer that reports offsets (tokenizer.json), "
            f"got {type(tokenizer).__name__}: {wheres[0]}"
        )
    writer = ChatWriter(tokenizer, template)
    written = [_write(writer, chat, where) for chat, where in zip(chats, wheres, strict=True)]
    encoded = tokenizer(
        [text for text, _ in written],
        add_special_tokens=False,  # the template writes them
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    token_offsets = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    sequences = []
    for (ids, offsets), (_, spans) in zip(token_offsets, written, strict=True):
        sequence = _sequence(ids, num_context=len(ids))
        starts = _token_starts(offsets)
        for begin, end in spans:
            sequence.is_target[(starts >= begin) & (starts < end)] = True
        sequence.is_target[:1] = False
        sequences.append(sequence)
    return sequences


def _write(writer: ChatWriter, chat: Mapping[str, Any], where: str) -> Written:
    try:
        return writer.write(chat)
    except ValueError as error:
        raise ValueError(f"{error}: {where}") from error


def encode_prompt(
    tokenizer: Any, text: str | Sequence[Mapping[str, Any]], tools: Any = None
) -> list[int]:
    """Returns the tokens of a text, or of messages whose next one is the assistant's.

    Args:
        tools: that the next message may call.

    Raises:
        ValueError: if it is neither, or the chat template is missing, refuses the
            messages, or passes over a part of them.
    """
    if isinstance(text, str):
        ids = list(tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
        return ids[:-1] if appends_eos(tokenizer) else ids
    chat = {"messages": read_messages(text)} | ({"tools": tools} if tools else {})
    rendered = ChatWriter(tokenizer).ask(chat)
    ids = tokenizer(rendered, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return list(ids["input_ids"])


def stop_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that end what is generated: those that the tokenizer and its folder's files name.

    Raises:
        ValueError: if such a file cannot be read.
    """
    values = [tokenizer.eos_token_id]
    for name in _END_FILES if tokenizer.name_or_path else ():
        path = Path(tokenizer.name_or_path) / name
        if path.is_file():
            try:
                values.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path} must be JSON of an object, got {error}") from error
    named = [value if isinstance(value, list) else [value] for value in values]
    return frozenset(token for tokens in named for token in tokens if token is not None)


def count_endless(sequence: TokenSequence, tokenizer: Any, stops: frozenset[int]) -> int:
    """How many of a chat's answers end, but for white space, in a token that stops nothing."""

    def is_blank(index: int) -> bool:
        return not tokenizer.decode([int(sequence.tokens[index])]).strip()

    edges = np.flatnonzero(np.diff(sequence.is_target.astype(np.int8), prepend=0, append=0))
    count = 0
    for begin, end in edges.reshape(-1, 2).tolist():
        last = end - 1
        while last > begin and int(sequence.tokens[last]) not in stops and is_blank(last):
            last -= 1
        count += int(sequence.tokens[last]) not in stops
    return count


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
