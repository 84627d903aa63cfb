"""Loads the CUDA kernels of `csrc/`, building them on first use, without torch's headers.

The library has a plain C interface, so that one build serves every torch, takes seconds, and a
process needs no compiler once the cache holds it. Kernels are launched on the stream the caller
names.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from tlora_megatron import timeline
from tlora_megatron.ops.kernel_build import ExtensionUnavailable, build, built_library


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
