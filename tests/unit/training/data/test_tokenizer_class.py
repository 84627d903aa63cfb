"""The tokenizer's class is the one that `AutoTokenizer` finds, with the same ids, not asking it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from tests.helpers.tiny_tokenizer import save_tiny_tokenizer
from tlora_megatron.training.data import tokenize
from tlora_megatron.training.data.tokenize import load_tokenizer

TEXTS = ["Hello  World's 12345 caf\u00e9 e\u0301\n\n x", "<|endoftext|></s> \u4f60\u597d\t!"]


def save_qwen(directory: Path) -> None:
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(["<|endoftext|>", *alphabet, "He"])}
    transformers.Qwen2Tokenizer(vocab=vocab, merges=[("H", "e")]).save_pretrained(directory)


def set_value(file: Path, key: str, value: Any) -> None:
    document = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(document | {key: value}))


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        *tokenize._KNOWN_CLASSES,
        ("mistral", "PreTrainedTokenizerFast"),
        ("qwen2", "PreTrainedTokenizerFast"),
        ("llama", "LlamaTokenizer"),
    ],
)
def test_class_and_ids_are_auto_tokenizer_s(
    tmp_path: Path, model_type: str, tokenizer_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokenizer_class.startswith("Qwen2"):
        save_qwen(tmp_path)
    else:
        save_tiny_tokenizer(tmp_path)
    set_value(tmp_path / "config.json", "model_type", model_type)
    set_value(tmp_path / "tokenizer_config.json", "tokenizer_class", tokenizer_class)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    if (model_type, tokenizer_class) in tokenize._KNOWN_CLASSES:
        monkeypatch.setattr(transformers, "AutoTokenizer", None)
    found = load_tokenizer(tmp_path)
    assert type(found) is type(expected)
    assert found(TEXTS)["input_ids"] == expected(TEXTS)["input_ids"]
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.chat_template == expected.chat_template


def test_code_that_comes_with_a_tokenizer_is_auto_tokenizer_s_to_refuse(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    set_value(tmp_path / "config.json", "model_type", "llama")
    set_value(tmp_path / "tokenizer_config.json", "auto_map", {"AutoTokenizer": ["a.B", None]})
    assert tokenize._tokenizer_class(tmp_path) is None
