"""Builds and loads the CUDA kernels of `csrc/` on first use, into a cache, without torch's headers.

The library has a plain C interface, so that one build serves every torch, takes seconds, and a
process needs no compiler once the cache holds it. Kernels are launched on the stream the caller
names.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tlora_megatron.config.shipped import shipped_folder

SOURCES = shipped_folder("csrc", "csrc", "lora_gemm.cu")
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-Xcompiler",
    "-fPIC",
    "-Xcompiler",
    "-fvisibility=hidden",
)
_ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
_PARALLEL = ("--threads", "0")
"""Sources are compiled beside each other, on as many cores as there are."""


class ExtensionUnavailable(RuntimeError):
    """Raised where the CUDA kernels cannot be built or loaded; says why and what would help."""


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
    if not SOURCES.is_dir():
        raise ExtensionUnavailable(
            f"the CUDA sources must lie in {SOURCES}, which does not exist: install tlora_megatron "
            "anew, from its checkout or a wheel with csrc/"
        )
    path = built_library()
    if not path.exists():
        build(path)
    try:
        return Extension(path)
    except OSError as error:
        raise ExtensionUnavailable(f"{path} cannot be loaded: {error}") from error


def cache_directory() -> Path:
    """Returns the folder of built libraries: TLORA_CACHE_DIR, else the user's cache folder."""
    if "TLORA_CACHE_DIR" in os.environ:
        return Path(os.environ["TLORA_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tlora_megatron"


def built_library() -> Path:
    """Returns the path of the library that the sources build: its name holds their hash."""
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


def build(path: Path) -> None:
    """Compiles `csrc/` into `path`; processes that build at once do not disturb each other.

    Raises:
        ExtensionUnavailable: with the compiler's last lines if it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ExtensionUnavailable(
            "nvcc was not found; install the CUDA toolkit (12.4 or newer) or set CUDA_HOME"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            sources = [str(source) for source in sorted(SOURCES.glob("*.cu"))]
            command = [compiler, *_FLAGS, _ARCHITECTURE, *_PARALLEL, *sources, "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ExtensionUnavailable(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
            os.replace(built, path)
    except OSError as error:
        raise ExtensionUnavailable(f"cannot build into {path.parent}: {error}") from error
