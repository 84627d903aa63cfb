"""The CUDA sources compile, load and agree with their Python side; what goes wrong is said."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlora_megatron.ops import extension
from tlora_megatron.ops.extension import ExtensionUnavailable
from tlora_megatron.ops.lora.cuda.arguments import STRUCTS

needs_compiler = pytest.mark.skipif(
    extension.find_compiler() is None, reason="needs nvcc, the CUDA compiler"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TLORA_CACHE_DIR", str(tmp_path))
    extension.load_extension.cache_clear()
    yield tmp_path
    extension.load_extension.cache_clear()


def fake_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes CUDA_HOME a folder whose nvcc is a shell script."""
    compiler = folder / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))


@pytest.mark.slow
@needs_compiler
def test_sources_compile_once_and_load(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = extension.load_extension()
    path = library.path
    assert path.parent == cache
    for name, struct in STRUCTS.items():
        assert library.size(name) == ctypes.sizeof(struct), name
    extension.load_extension.cache_clear()
    fake_compiler(tmp_path, "exit 1", monkeypatch)
    assert extension.load_extension().path == path
    assert [p.name for p in cache.iterdir() if p.suffix == ".so"] == [path.name]


def test_an_installation_without_sources_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "SOURCES", tmp_path / "csrc")
    with pytest.raises(ExtensionUnavailable, match=r"csrc, which does not exist: install tlora"):
        extension.load_extension()


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = extension.built_library()
    changed = tmp_path / "sources"
    changed.mkdir()
    for source in extension.SOURCES.iterdir():
        (changed / source.name).write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(extension, "SOURCES", changed)
    assert extension.built_library() != before


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "find_compiler", lambda: None)
    with pytest.raises(ExtensionUnavailable, match="nvcc was not found; install the CUDA toolkit"):
        extension.load_extension()


def test_failed_build_shows_the_compilers_words_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, "echo 'error: no such architecture' >&2; exit 3", monkeypatch)
    with pytest.raises(ExtensionUnavailable, match="nvcc failed: error: no such architecture"):
        extension.load_extension()
    assert [p.name for p in cache.iterdir()] == ["cuda"]


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fake_compiler(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setenv("TLORA_CACHE_DIR", str(blocked / "inside"))
    with pytest.raises(ExtensionUnavailable, match=r"cannot build into .*inside"):
        extension.load_extension()


def test_a_library_that_does_not_load_is_named(cache: Path) -> None:
    path = extension.built_library()
    path.write_bytes(b"not a library")
    with pytest.raises(ExtensionUnavailable, match=f"{path.name} cannot be loaded"):
        extension.load_extension()


def test_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, "exit 0", monkeypatch)
    assert extension.find_compiler() == str(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", os.devnull)
    assert extension.find_compiler() != str(tmp_path / "cuda" / "bin" / "nvcc")
