"""Our files are byte by byte those of safetensors, and a disk that refuses is a plain OSError."""

from __future__ import annotations

import errno
import itertools
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from tlora_megatron.training.formats import safetensors_file
from tlora_megatron.training.formats.safetensors_file import (
    PendingTensor,
    Scratch,
    holds_tensors,
    write_tensors,
)


def tensors() -> dict[str, Tensor]:
    """Names in no order, of odd sizes, one of them not plain ASCII."""
    torch.manual_seed(0)
    names = ("z.lora_A", "layers.10.q", "layers.9.q", 'größe "q"', "a")
    return {name: torch.randn(3 + i, 7 * i + 1) for i, name in enumerate(names)}


def pending(content: dict[str, Tensor]) -> list[PendingTensor]:
    def read(tensor: Tensor, scratch: Scratch) -> Tensor:
        room = scratch.room(tuple(tensor.shape))
        return room.copy_(tensor)

    return [PendingTensor(name, tuple(t.shape), partial(read, t)) for name, t in content.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_bytes_are_those_of_safetensors(
    tmp_path: Path, metadata: dict[str, str] | None, dtype: torch.dtype
) -> None:
    content, path = tensors(), tmp_path / "file"
    size = write_tensors(path, pending(content), metadata=metadata, dtype=dtype)
    expected = save({name: t.to(dtype) for name, t in content.items()}, metadata=metadata)
    assert path.read_bytes() == expected
    assert size == len(expected)
    assert holds_tensors(path, pending(content), metadata=metadata, dtype=dtype)


def test_the_disk_begins_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[int, int]]()
    monkeypatch.setattr(safetensors_file, "_AHEAD_BYTES", 300)
    monkeypatch.setattr(safetensors_file, "_begin_writing", lambda _, *part: begun.append(part))
    size = write_tensors(tmp_path / "file", pending(tensors()))
    begun.sort()  # by several threads
    assert len(begun) > 1
    assert begun[-1][1] == size
    assert all(first[1] == second[0] for first, second in itertools.pairwise(begun))


def test_another_value_name_or_length_is_another_file(tmp_path: Path) -> None:
    content, path = tensors(), tmp_path / "file"
    write_tensors(path, pending(content))
    changed = content | {"a": content["a"] + 1}
    renamed = {name.replace("a", "b", 1): t for name, t in content.items()}
    assert not holds_tensors(path, pending(changed))
    assert not holds_tensors(path, pending(renamed))
    path.write_bytes(path.read_bytes()[:-1])
    assert not holds_tensors(path, pending(content))
    assert not holds_tensors(tmp_path / "missing", pending(content))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, path, pwrite = tensors(), tmp_path / "file", os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:5], offset))
    write_tensors(path, pending(content))
    assert all(torch.equal(t, content[name]) for name, t in load_file(path).items())


def test_a_full_disk_refuses_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> int:
        raise AssertionError("nothing may be written")

    monkeypatch.setattr(os, "pwrite", never)
    huge = [PendingTensor("huge", (1 << 30, 1 << 20), lambda scratch: torch.empty(0))]
    with pytest.raises(OSError, match=r"No space left|File too large"):
        write_tensors(tmp_path / "file", huge)


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    content = tensors() | {"m": torch.tensor([[1.0, torch.nan]])}
    with pytest.raises(ValueError, match="m must be finite, got NaN or inf"):
        write_tensors(tmp_path / "file", pending(content))


def test_a_disk_that_fills_up_is_an_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, pwrite = 300, os.pwrite

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = pwrite(descriptor, data[:left], offset)
        left -= written
        return written

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "file", pending(tensors()))
