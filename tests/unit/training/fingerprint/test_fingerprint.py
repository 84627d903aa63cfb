"""The fingerprint of a base: its text, its file, and the reference that computes it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_models import TINY_MODEL_TYPES, make_tiny_model
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.training.formats import fingerprint as reference
from tlora_megatron.training.formats.fingerprint import (
    FILE_NAME,
    Fingerprint,
    fingerprint_tokens,
    read_fingerprint,
    write_fingerprint,
)
from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, Rows, weight_source
from tlora_megatron.training.run.fingerprint import allowed_error, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class CountingSource(HFCheckpoint):
    """Counts how often each tensor is read, and remembers the order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.order: list[str] = []

    def read(self, name: str, rows: Rows = None, cols: slice | None = None) -> torch.Tensor:
        self.order.append(name)
        return super().read(name, rows, cols)


def take(folder: Path, **options: Any) -> Fingerprint:
    spec = read_model_spec(folder / "config.json")
    options = {"dtype": torch.float32, "device": CPU} | options
    source = weight_source(spec, options.pop("source", HFCheckpoint(folder)), CPU)
    return reference.make_fingerprint(spec, source, **options)


def by_transformers(
    folder: Path, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        log_probs = model(torch.tensor([tokens[:-1]])).logits[0].float().log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens[1:])[:, None]).flatten().tolist()


@pytest.mark.parametrize("kind", [*TINY_MODEL_TYPES, "gpt_oss"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_reference_is_transformers(
    tmp_path: Path, kind: Any, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_VOCABULARY_ROWS", 50)
    make_tiny_model(tmp_path, kind, tied=tied)
    fingerprint = take(tmp_path)
    expected = by_transformers(tmp_path, fingerprint.tokens)
    assert fingerprint.log_probs == pytest.approx(expected, abs=1e-5)
    assert relative_error(fingerprint, expected) < 1e-5


def test_the_error_of_bfloat16_is_that_of_a_model_in_bfloat16(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    fingerprint = take(tmp_path)
    found = by_transformers(tmp_path, fingerprint.tokens, torch.bfloat16)
    error = relative_error(fingerprint, found)
    assert fingerprint.bf16_error / 2 < error < fingerprint.bf16_error * 2
    assert error < allowed_error(fingerprint, "bfloat16", CPU)


def test_one_layer_is_read_after_another_and_each_tensor_once(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2", num_shards=3)
    source, done = CountingSource(tmp_path), []
    take(tmp_path, source=source, on_layer=done.append)
    assert done == [0, 1, 2, 3]
    assert set(Counter(source.order).values()) == {1}
    layers = [int(name.split(".")[2]) for name in source.order if ".layers." in name]
    assert layers == sorted(layers)


def test_weights_are_rounded_to_the_type_in_which_they_are_stored(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    exact, rounded = take(tmp_path), take(tmp_path, dtype=torch.bfloat16)
    assert 1e-4 < relative_error(exact, rounded.log_probs) < 0.1


def test_a_base_that_overflows_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.lm_head.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must give finite log-probabilities"):
        take(tmp_path)


class TestText:
    def test_it_depends_on_the_vocabulary_alone(self) -> None:
        tokens = fingerprint_tokens(32000, 4096, None)
        assert len(tokens) == 512
        assert tokens[:4] == (22785, 3799, 6981, 319)
        assert fingerprint_tokens(32000, 100, None) == tokens[:100]
        assert fingerprint_tokens(32000, 4096, 64) == tokens[:64]

    @pytest.mark.parametrize("vocab_size", [264, 151936])
    def test_it_is_varied_and_repeats_itself_at_many_distances(self, vocab_size: int) -> None:
        tokens = fingerprint_tokens(vocab_size, 4096, None)
        assert 0 <= min(tokens) < max(tokens) < vocab_size
        assert len(set(tokens)) > min(vocab_size / 2, 370)
        blocks = [tokens[begin : begin + 32] for begin in range(0, 512, 32)]
        copied = {b: blocks.index(block) for b, block in enumerate(blocks) if b % 4 == 3}
        assert copied == {3: 0, 7: 2, 11: 4, 15: 6}


FINGERPRINT = Fingerprint(
    vocab_size=8, tokens=(1, 2, 3, 4), log_probs=(-1.0, -2.0, -3.0), bf16_error=0.02
)


class TestFile:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        assert read_fingerprint(tmp_path) is None
        write_fingerprint(tmp_path, FINGERPRINT)
        assert read_fingerprint(tmp_path) == FINGERPRINT

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"format": 2}, "got format 2; convert the base again, or delete the file"),
            ({"tokens": [1, 2]}, "2 tokens, 3 log-prob"),
            ({"tokens": [1, 2, 3, 8]}, "token 8 of 8"),
            ({"log_probs": [-1.0, float("nan"), -2.0]}, "not finite"),
            ({"bf16_error": None}, "must be a fingerprint that `tlora convert` wrote"),
        ],
    )
    def test_other_content(self, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        write_fingerprint(tmp_path, FINGERPRINT)
        file = tmp_path / FILE_NAME
        whole = file.read_text()
        file.write_text(json.dumps(json.loads(whole) | changes))
        with pytest.raises(ValueError, match=message):
            read_fingerprint(tmp_path)
        file.write_text(whole[:20])
        with pytest.raises(ValueError, match="must be a fingerprint"):
            read_fingerprint(tmp_path)


class TestError:
    def test_it_is_relative_to_the_spread(self) -> None:
        assert relative_error(FINGERPRINT, FINGERPRINT.log_probs) == 0
        spread = (2 / 3) ** 0.5
        shifted = [x + 0.1 for x in FINGERPRINT.log_probs]
        assert relative_error(FINGERPRINT, shifted) == pytest.approx(0.1 / spread)
        assert relative_error(FINGERPRINT, shifted[:2]) == pytest.approx(0.1 / spread)

    def test_a_flat_base_can_be_told_from_another(self) -> None:
        flat = replace(FINGERPRINT, log_probs=(-2.0,) * 3)
        assert relative_error(flat, flat.log_probs) == 0
        assert relative_error(flat, (-2.1,) * 3) > 1

    def test_what_is_allowed_follows_the_precision(self) -> None:
        assert allowed_error(FINGERPRINT, "float32", CPU) == 1e-4
        assert allowed_error(FINGERPRINT, "float32", GPU) == pytest.approx(0.01)
        assert allowed_error(FINGERPRINT, "bfloat16", GPU) == pytest.approx(0.06)
        assert allowed_error(FINGERPRINT, "fp8", GPU) == 0.5
        sharp = replace(FINGERPRINT, bf16_error=0.0)
        assert allowed_error(sharp, "float32", GPU) == 1e-3
        assert allowed_error(sharp, "bfloat16", CPU) == 1e-2
