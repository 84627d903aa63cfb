"""Compiles the CUDA kernels of `csrc/` into a cache and loads them, without torch and its headers.

Every `.cu` file is a unit. Processes that share a cache take turns: one compiles, the others wait
for its library.

The library has a plain C interface, so that one build serves every torch, takes seconds, and a
process needs no compiler once the cache holds it. Kernels are launched on the stream the caller
names.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tlora_megatron import timeline
from tlora_megatron.files import shipped_folder

logger = logging.getLogger(__name__)

SOURCES = shipped_folder("csrc", "csrc", "lora_gemm.cu")
_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden")
_ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
_HOPPER = "9."
"""Beginning of its compute capability."""
_LOCK_NAME = "kernels.lock"
_POLL_S = 0.05
_TELL_EVERY_S = 3.0


class ExtensionUnavailable(RuntimeError):
    """Raised where the CUDA kernels cannot be built or loaded; says why and what would help."""


def cache_directory() -> Path:
    """Returns the folder of built libraries: TLORA_CACHE_DIR, else the user's cache folder."""
    if "TLORA_CACHE_DIR" in os.environ:
        return Path(os.environ["TLORA_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tlora_megatron"


def built_library() -> Path:
    """Returns the path of the library that the sources build: its name holds their hash.

    Raises:
        ExtensionUnavailable: without the sources.
    """
    if not SOURCES.is_dir():
        raise ExtensionUnavailable(
            f"the CUDA sources must lie in {SOURCES}, which does not exist: install tlora_megatron "
            "anew, from its checkout or a wheel with csrc/"
        )
    digest = hashlib.sha256(" ".join((*_FLAGS, _ARCHITECTURE)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_directory() / f"kernels_{digest.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    """Returns the path of nvcc, from CUDA_HOME, PATH or the usual place; None without one."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [os.path.join(home, "bin", "nvcc") for home in (*named, "/usr/local/cuda")]
    candidates.insert(len(named), shutil.which("nvcc") or "")
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def has_hopper_gpu() -> bool:
    """Asks nvidia-smi whether a GPU of compute capability 9 is there.

    Neither torch nor the driver is loaded here: who trains has yet to set what CUDA reads when it
    starts.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return any(line.startswith(_HOPPER) for line in found.stdout.splitlines())


def build_early() -> None:
    """Starts the build on a thread if this machine needs it, so that it overlaps the imports.

    Who needs the library calls `build`, which waits for this one and says what goes wrong.
    """
    if not SOURCES.is_dir() or built_library().exists() or find_compiler() is None:
        return

    def work() -> None:
        with suppress(ExtensionUnavailable):
            if has_hopper_gpu():
                build(built_library(), tells=False)

    threading.Thread(target=work, name="kernel build", daemon=True).start()


def build(path: Path, *, tells: bool = True) -> None:
    """Compiles `csrc/` into `path`, or waits for the process that does.

    Raises:
        ExtensionUnavailable: with the compiler's last lines if it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ExtensionUnavailable(
            "nvcc was not found; install the CUDA toolkit (12.4 or newer) or set CUDA_HOME"
        )
    progress = _Progress(path, tells)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path, progress):
            if not path.exists():
                _compile(compiler, path, progress)
    except OSError as error:
        raise ExtensionUnavailable(f"cannot build into {path.parent}: {error}") from error


class _Progress:
    """Counts the finished units of a build, whichever process compiles them."""

    def __init__(self, path: Path, tells: bool) -> None:
        self._path = path
        self._tells = tells
        self._begin_s = self._told_s = time.monotonic()
        self._units = len(_units())

    def pause(self) -> None:
        """Sleeps a little; says how far the build is when it is time."""
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        if not self._tells or now_s - self._told_s < _TELL_EVERY_S:
            return
        self._told_s = now_s
        done = len(list(self._path.parent.glob(f"{self._path.stem}.*/*.o")))
        logger.info(
            "compiling the CUDA kernels, once for this machine: %d of %d units after %.0f s",
            done,
            self._units,
            now_s - self._begin_s,
        )


@contextmanager
def _turn(path: Path, progress: _Progress) -> Iterator[None]:
    """Waits until no other process builds; the kernel frees the turn of one that ends anyhow.

    On a file system without locks every process builds for itself.
    """
    with (path.parent / _LOCK_NAME).open("w") as file:
        while not path.exists():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress.pause()
                continue
            except OSError:  # no locks there
                break
            for left in path.parent.glob(f"{path.stem}.*/"):  # by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            break
        yield


def _compile(compiler: str, path: Path, progress: _Progress) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}.") as folder:
        calls = {Path(folder) / f"{unit.stem}.o": ("-c", str(unit)) for unit in _units()}
        _run(compiler, calls, progress)
        linked = Path(folder) / path.name
        _run(compiler, {linked: ("-shared", *map(str, calls))}, progress)
        os.replace(linked, path)


def _run(compiler: str, calls: Mapping[Path, Sequence[str]], progress: _Progress) -> None:
    """Runs the compiler side by side, at most as often as there are cores; ends all if one fails.

    Args:
        calls: what each call writes, and its words.

    Raises:
        ExtensionUnavailable: with the last words of the call that failed.
    """
    waiting, running = list(calls), dict[Path, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                out = waiting.pop(0)
                command = [compiler, *_FLAGS, _ARCHITECTURE, *calls[out], "-o", str(out)]
                with out.with_suffix(".log").open("wb") as log:
                    running[out] = subprocess.Popen(command, stdout=log, stderr=log)
            progress.pause()
            for out, process in list(running.items()):
                code = process.poll()
                if code:
                    said = out.with_suffix(".log").read_text(errors="replace").strip()[-2000:]
                    raise ExtensionUnavailable(f"{compiler} failed: {said}")
                if code == 0:
                    del running[out]
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _units() -> list[Path]:
    """Sources that are compiled; backwards, the ones that take longest begin first."""
    return sorted(SOURCES.glob("*.cu"), reverse=True)


class Extension:
    """The loaded library: functions that take a struct by address and a stream, 0 = done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.tlora_message.restype = ctypes.c_char_p
        self._functions: dict[str, Callable[..., int]] = {}

    def size(self, name: str) -> int:
        """Bytes of the struct that the function `name` takes."""
        return int(getattr(self._library, f"tlora_{name}_size")())

    def call(self, name: str, arguments: bytes | ctypes.Structure, stream: int) -> None:
        """Launches on a CUDA stream.

        Args:
            arguments: the function's struct, or the bytes of one (`arguments.packer`).

        Raises:
            RuntimeError: if the kernel does not support an operand or the launch fails.
        """
        function = self._functions.get(name) or self._function(name)
        at = arguments if isinstance(arguments, bytes) else ctypes.byref(arguments)
        if function(at, stream):
            message = self._library.tlora_message().decode()
            raise RuntimeError(f"CUDA kernel {name}: {message}")

    def _function(self, name: str) -> Callable[..., int]:
        function = getattr(self._library, f"tlora_{name}")
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._functions[name] = function
        return function


@functools.cache
def load_extension() -> Extension:
    """Returns the library, building it if the cache does not hold it.

    Raises:
        ExtensionUnavailable: if the sources or a CUDA compiler are missing, or the build or the
            loading fails.
    """
    with timeline.phase("kernels"):
        path = built_library()
        if not path.exists():
            build(path)
        try:
            return Extension(path)
        except OSError as error:
            raise ExtensionUnavailable(f"{path} cannot be loaded: {error}") from error
