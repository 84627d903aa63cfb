"""Tokens from the cache: the same bits, one entry for all that shapes them, damage made good."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tiny_tokenizer
from tlora_megatron.config.job import DataSpec, JobSpec
from tlora_megatron.training.data import mapped_tokens
from tlora_megatron.training.data.job_data import (
    ENTRY_NAME,
    JobData,
    TokenCache,
    TokenizerFolder,
    load_job_data,
)
from tlora_megatron.training.data.mapped_tokens import MappedSequences, lengths_of

ROWS = [
    *({"text": "x" * n} for n in (3, 70, 1, 9)),
    {"prompt": "why? ", "completion": "so"},
    {"messages": [{"role": role, "content": role[0]} for role in ("user", "assistant")]},
]


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    for name, rows in (("train", ROWS), ("eval", ROWS[3:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSpec(train=str(tmp_path / "train"), eval=str(tmp_path / "eval"))
    return JobSpec(name="x", data=data, max_steps=1, max_seq_len=16)


@pytest.fixture
def source(tmp_path: Path) -> TokenizerFolder:
    (tmp_path / "base").mkdir()
    save_tiny_tokenizer(tmp_path / "base")
    return TokenizerFolder(tmp_path / "base")


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return TokenCache(tmp_path / "cache")


def _same(one: JobData, other: JobData) -> None:
    for mine, theirs in ((one.train, other.train), (one.eval, other.eval)):
        assert lengths_of(mine).tolist() == lengths_of(theirs).tolist()
        for a, b in zip(mine, theirs, strict=True):
            assert (a.tokens.dtype, a.is_target.dtype) == (np.int32, bool)
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.is_target.tolist() == b.is_target.tolist()
    assert one.fingerprint == other.fingerprint
    assert (one.num_truncated, one.num_dropped) == (other.num_truncated, other.num_dropped)


def test_the_cache_gives_the_bits_of_the_files(
    cache: TokenCache, job: JobSpec, source: TokenizerFolder, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_job_data(job, source.tokenizer, VOCAB_SIZE)
    told = [record.getMessage() for record in caplog.records]
    caplog.clear()
    first = cache.load(job, source, VOCAB_SIZE)
    _same(first.data, expected)
    os.unlink(job.data.train)  # a gang needs neither file nor tokenizer
    again = cache.load(job, TokenizerFolder(Path("nowhere")), VOCAB_SIZE, first.keys)
    _same(again.data, expected)
    assert again.keys == first.keys
    assert isinstance(again.data.train, MappedSequences)
    # What was cut, and which answers never end, is told again.
    assert [r.getMessage() for r in caplog.records] == told * 2
    assert sum("ends 1 answers with no" in text for text in told) == 2
    assert again.data.train[-1].tokens.tolist() == expected.train[-1].tokens.tolist()
    assert len(again.data.train[1:3]) == 2
    with pytest.raises(IndexError):
        again.data.train[len(again.data.train)]


def test_an_entry_is_its_owners(cache: TokenCache, job: JobSpec, source: TokenizerFolder) -> None:
    loaded = cache.load(job, source, VOCAB_SIZE)
    entry = cache.folder / loaded.keys["train"]
    assert os.listdir(entry) == [ENTRY_NAME]
    assert (entry.stat().st_mode & 0o777, (entry / ENTRY_NAME).stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    arrays = load_file(entry / ENTRY_NAME)
    assert np.diff(arrays["ends"], prepend=0).tolist() == lengths_of(loaded.data.train).tolist()
    assert arrays["tokens"].dtype == np.int32
    assert arrays["is_target"].dtype == bool


def test_all_that_shapes_tokens_is_in_the_key(
    cache: TokenCache, job: JobSpec, source: TokenizerFolder, tmp_path: Path
) -> None:
    def key(one: JobSpec = job, vocab_size: int = VOCAB_SIZE) -> str:
        return cache.load(one, TokenizerFolder(source.folder), vocab_size).keys["train"]

    first = key()
    others = [key(replace(job, max_seq_len=15)), key(vocab_size=VOCAB_SIZE + 1)]
    others.append(key(replace(job, max_seq_len=80, data=replace(job.data, overlong="error"))))
    copied = tmp_path / "copy"
    copied.write_bytes(Path(job.data.train).read_bytes())
    assert key(replace(job, name="y", data=replace(job.data, train=str(copied)))) == first
    copied.write_bytes(copied.read_bytes() + b"\n")
    others.append(key(replace(job, data=replace(job.data, train=str(copied)))))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (source.folder / "chat_template.jinja").write_text(template)
    others.append(key())
    (source.folder / "model.safetensors").write_text("weights shape no token")
    assert key() == others[-1]
    assert len({first, *others}) == 6


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "header", "swapped"])
def test_a_damaged_entry_is_made_again(
    cache: TokenCache,
    job: JobSpec,
    source: TokenizerFolder,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = cache.load(job, source, VOCAB_SIZE)
    path = cache.folder / first.keys["train"] / ENTRY_NAME
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    path.unlink()  # a file that is cut under a map ends the process
    path.write_bytes({
        "cut": whole[:-1],
        "empty": b"",
        "flipped": bytes(flipped),
        "header": b"\xff" * 8 + whole[8:],
        "swapped": whole.replace(b'"is_target"', b'"is_target_"'),
    }[damage])  # fmt: skip
    with caplog.at_level(logging.WARNING):
        _same(cache.load(job, source, VOCAB_SIZE, first.keys).data, first.data)
    assert "tokens are made again" in caplog.text
    assert path.read_bytes() == whole


def test_a_known_key_is_of_a_file(cache: TokenCache, job: JobSpec, source: TokenizerFolder) -> None:
    keys = cache.load(job, source, VOCAB_SIZE).keys
    (cache.folder / keys["train"] / ENTRY_NAME).unlink()
    Path(job.data.train).write_text('{"text": "other"}\n')
    with pytest.raises(ValueError, match=r"data\.train must be the file that was validated.*'x'"):
        cache.load(job, source, VOCAB_SIZE, keys)


def test_mistakes_are_told_as_without_a_cache_and_leave_no_entry(
    cache: TokenCache, job: JobSpec, source: TokenizerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(job.data.train).write_text('{"text": "good"}\n{"txt": 1}\n')
    errors = []
    for load in (
        lambda: load_job_data(job, source.tokenizer, VOCAB_SIZE),
        lambda: cache.load(job, source, VOCAB_SIZE),
    ):
        with pytest.raises(ValueError, match="line 2") as caught:
            load()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    Path(job.data.train).write_text('{"text": "good"}\n')
    monkeypatch.setattr(mapped_tokens.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        cache.load(job, source, VOCAB_SIZE)
    left: list[Any] = [path for path in cache.folder.rglob("*") if path.is_file()]
    assert left == []


def test_what_is_idle_or_left_by_a_killed_writer_is_removed(
    cache: TokenCache, job: JobSpec, source: TokenizerFolder
) -> None:
    keys = cache.load(job, source, VOCAB_SIZE).keys
    entry, used = (cache.folder / keys[name] / ENTRY_NAME for name in ("train", "eval"))
    left = used.with_name("tmp123")
    left.touch()
    for path in (entry, used, left):
        os.utime(path, (0, 0))
    cache.load(replace(job, data=DataSpec(train=str(job.data.eval))), source, VOCAB_SIZE)
    cache.prune()
    assert not entry.parent.exists()
    assert os.listdir(used.parent) == [ENTRY_NAME]
