"""The CUDA sources compile, load and agree with their Python side; what goes wrong is said."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.cuda_cases import STRUCTS
from tests.helpers.launch import HANG_S
from tlora_megatron.ops import kernel_build
from tlora_megatron.ops.kernel_build import ExtensionUnavailable

needs_compiler = pytest.mark.skipif(
    kernel_build.find_compiler() is None, reason="needs nvcc, the CUDA compiler"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TLORA_CACHE_DIR", str(tmp_path))
    kernel_build.load_extension.cache_clear()
    yield tmp_path
    kernel_build.load_extension.cache_clear()


def fake_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes CUDA_HOME a folder whose nvcc is a shell script."""
    compiler = folder / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))


@dataclass(frozen=True, slots=True)
class Built:
    """The libraries that the compiler has made of the sources, and its words on each unit."""

    cache: Path
    library: Path
    said: Path


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Compiles the sources once, with reports on registers, which change no code.

    Units whose registers no test reads are hardly optimised: that halves their time. What was
    compiled stays in pytest's cache as long as sources and this file are the same.
    """
    kept = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = request.config.cache.mkdir(f"{kernel_build.built_library().stem}_{kept}")
    cache, said = folder / "cache", folder / "said"
    cache.mkdir(exist_ok=True)
    said.mkdir(exist_ok=True)
    script = f"""\
for out; do :; done
words="{said}/$(basename "$out").txt"
case "$words" in *fp8_*) less="" ;; *) less="-Xcicc -O1 -Xptxas -O1" ;; esac
"{kernel_build.find_compiler()}" -Xptxas=-v $less "$@" 2>"$words" && exit
cat "$words" >&2
exit 1"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLORA_CACHE_DIR", str(cache))
        fake_compiler(tmp_path_factory.mktemp("nvcc"), script, patch)
        kernel_build.load_extension.cache_clear()
        library = kernel_build.load_extension().path
    return Built(cache, library, said)


@pytest.mark.slow
@needs_compiler
def test_sources_compile_once_and_load(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLORA_CACHE_DIR", str(built.cache))
    fake_compiler(tmp_path, "exit 1", monkeypatch)
    library = kernel_build.load_extension()
    assert library.path == built.library
    assert library.path.parent == built.cache
    for name, struct in STRUCTS.items():
        assert library.size(name) == ctypes.sizeof(struct), name
    assert [p.name for p in built.cache.iterdir() if p.suffix == ".so"] == [built.library.name]


def test_missing_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_build, "SOURCES", tmp_path / "csrc")
    with pytest.raises(ExtensionUnavailable, match=r"csrc, which does not exist: install tlora"):
        kernel_build.load_extension()


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_build.built_library()
    changed = tmp_path / "sources"
    changed.mkdir()
    for source in kernel_build.SOURCES.iterdir():
        (changed / source.name).write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(kernel_build, "SOURCES", changed)
    assert kernel_build.built_library() != before


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_build, "find_compiler", lambda: None)
    with pytest.raises(ExtensionUnavailable, match="nvcc was not found; install the CUDA toolkit"):
        kernel_build.load_extension()


def test_failed_build_shows_the_compilers_words_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, "echo 'error: no such architecture' >&2; exit 3", monkeypatch)
    with pytest.raises(ExtensionUnavailable, match="nvcc failed: error: no such architecture"):
        kernel_build.load_extension()
    assert sorted(p.name for p in cache.iterdir()) == ["cuda", "kernels.lock"]


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fake_compiler(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setenv("TLORA_CACHE_DIR", str(blocked / "inside"))
    with pytest.raises(ExtensionUnavailable, match=r"cannot build into .*inside"):
        kernel_build.load_extension()


def test_a_library_that_does_not_load_is_named(cache: Path) -> None:
    path = kernel_build.built_library()
    path.write_bytes(b"not a library")
    with pytest.raises(ExtensionUnavailable, match=f"{path.name} cannot be loaded"):
        kernel_build.load_extension()


def test_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path, "exit 0", monkeypatch)
    assert kernel_build.find_compiler() == str(tmp_path / "cuda" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", os.devnull)
    assert kernel_build.find_compiler() != str(tmp_path / "cuda" / "bin" / "nvcc")


WRITES_ITS_OUTPUT = 'echo "$*" >> "$CALLS"; sleep 0.05; for out; do :; done; : > "$out"'
"""A compiler that notes its arguments and takes its time."""


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


@pytest.fixture
def patient_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    fake_compiler(tmp_path, WRITES_ITS_OUTPUT, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("patient_compiler")
def test_processes_that_build_at_once_compile_once(tmp_path: Path) -> None:
    code = (
        "from tlora_megatron.ops.kernel_build import build, built_library\nbuild(built_library())\n"
    )
    begun = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(HANG_S) for process in begun] == [0, 0]
    units = len(list(kernel_build.SOURCES.glob("*.cu")))
    assert len(calls(tmp_path)) == units + 1
    assert kernel_build.built_library().exists()


@pytest.mark.usefixtures("patient_compiler")
def test_an_early_build_is_the_only_one_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_build, "has_hopper_gpu", lambda: True)
    monkeypatch.setattr(kernel_build, "_TELL_EVERY_S", 0.0)
    kernel_build.build_early()
    with caplog.at_level("INFO", logger="tlora_megatron"):
        kernel_build.build(kernel_build.built_library())
    units = len(list(kernel_build.SOURCES.glob("*.cu")))
    assert len(calls(tmp_path)) == units + 1
    assert re.search(rf"once for this machine: \d+ of {units} units after \d+ s", caplog.text)


@pytest.mark.usefixtures("patient_compiler")
def test_nothing_is_built_early_without_a_hopper_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_build, "has_hopper_gpu", lambda: False)
    kernel_build.build_early()
    for thread in threading.enumerate():
        if thread.name == "kernel build":
            thread.join(HANG_S)
    assert not (tmp_path / "calls").exists()


@pytest.mark.usefixtures("patient_compiler")
def test_what_a_killed_build_left_is_removed(cache: Path) -> None:
    path = kernel_build.built_library()
    left = cache / f"{path.stem}.left"
    left.mkdir()
    (left / "exchange.o").write_bytes(b"")
    kernel_build.build(path)
    assert path.exists()
    assert not left.exists()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("unit", ["fp8_dgrad", "fp8_gemm_128", "fp8_gemm_192", "fp8_gemm_256"])
def test_kernels_keep_their_sums_in_registers(unit: str, built: Built) -> None:
    """Nothing spills, and the compiler neither serialises tensor cores nor ignores `setmaxnreg`."""
    said = (built.said / f"{unit}.o.txt").read_text()
    spills = [line for line in said.splitlines() if "spill" in line]
    assert spills, "the compiler must report on registers"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills), said
    assert not re.search(r"\(C75(?!19)", said), said  # 19: a fence more, before products begin
