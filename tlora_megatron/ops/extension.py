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
from pathlib import Path
from typing import NamedTuple

import torch

from tlora_megatron.ops.columns import OutputColumns

SOURCES = Path(__file__).parent.parent / "csrc"
MAX_TARGETS = 4
"""Targets of one linear: `kMaxTargets` of lora_gemm.cu."""
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


class ExtensionUnavailable(RuntimeError):
    """The CUDA kernels cannot be had here; the text says why and what would help."""


class Gemm(NamedTuple):
    """One call of the rank-extended GEMM `out = x W + rank part` (lora_gemm.cu).

    Shapes: T rows, K reduction, N output columns. Tensors are row-major, 16-byte aligned, fp16 or
    bf16 but where said.
    """

    x: torch.Tensor
    """`[T, K]`."""
    weight: torch.Tensor
    """`[N, K]` if `transposed`, else `[K, N]`."""
    transposed: bool
    out: torch.Tensor
    """`[T, N]`."""
    bias: torch.Tensor | None
    """`[N]`."""
    ext: torch.Tensor | None
    """`[chunks * 16, 256]`; None = no rank part."""
    factors: tuple[torch.Tensor, ...]
    """Arenas: one a target, or one that all targets share."""
    columns: tuple[OutputColumns, ...]
    """A target: the output columns its arena holds; empty = the shared arena holds all."""
    num_targets: int
    tile_chunks: torch.Tensor | None
    """int32 `[row tiles, num_targets + 1]` (`TilePlan.tile_chunks`)."""
    chunk_rows: torch.Tensor | None
    """int32 `[chunks]`: first row of each chunk in its arena."""
    row_keys: torch.Tensor | None
    """int32 `[T]`; None = no dropout on the rank part."""
    row_dropout: torch.Tensor | None
    """fp32 `[T]`."""
    dropout_key: int
    first_column: int
    tile_columns: int
    """Columns of a tile: 128, 192 or 256."""
    group: int
    """Row tiles whose column tiles are computed one after another."""


class _Columns(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("groups", "stride", "begin", "width")]


class _Arguments(ctypes.Structure):
    """`TloraGemm` of lora_gemm.cu."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("ext", ctypes.c_void_p),
        ("factors", ctypes.c_void_p * MAX_TARGETS),
        ("out", ctypes.c_void_p),
        ("tile_chunks", ctypes.c_void_p),
        ("chunk_rows", ctypes.c_void_p),
        ("row_keys", ctypes.c_void_p),
        ("row_dropout", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns_out", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("ext_rows", ctypes.c_int64),
        ("factor_rows", ctypes.c_int64 * MAX_TARGETS),
        ("columns", _Columns * MAX_TARGETS),
        ("num_targets", ctypes.c_int),
        ("dropout_key", ctypes.c_int),
        ("first_column", ctypes.c_int),
        ("half_precision", ctypes.c_int),
        ("transposed", ctypes.c_int),
        ("tile_columns", ctypes.c_int),
        ("group", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("device", ctypes.c_int),
    ]


class Extension:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        library.tlora_message.restype = ctypes.c_char_p
        library.tlora_gemm.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_void_p]
        assert library.tlora_arguments_size() == ctypes.sizeof(_Arguments), "TloraGemm has changed"
        self._library = library

    def gemm(self, call: Gemm) -> None:
        """Launches the GEMM on the current stream of its tensors' device.

        Raises:
            RuntimeError: if an operand does not suit the kernel or the launch fails.
        """
        arguments = _arguments(call)
        stream = torch.cuda.current_stream(call.x.device).cuda_stream
        if self._library.tlora_gemm(ctypes.byref(arguments), stream):
            raise RuntimeError(f"CUDA kernel: {self._library.tlora_message().decode()}")


def _arguments(call: Gemm) -> _Arguments:
    arguments = _Arguments(
        x=call.x.data_ptr(),
        weight=call.weight.data_ptr(),
        bias=_pointer(call.bias),
        out=call.out.data_ptr(),
        rows=call.x.shape[0],
        columns_out=call.out.shape[1],
        depth=call.x.shape[1],
        half_precision=call.x.dtype == torch.float16,
        transposed=call.transposed,
        tile_columns=call.tile_columns,
        group=call.group,
        blocks=_blocks(call.x.device),
        device=call.x.device.index,
    )
    if call.ext is not None:
        _add_rank_part(arguments, call, call.ext)
    return arguments


def _add_rank_part(arguments: _Arguments, call: Gemm, ext: torch.Tensor) -> None:
    arguments.ext = ext.data_ptr()
    arguments.ext_rows = ext.shape[0]
    arguments.num_targets = call.num_targets
    arguments.tile_chunks = _pointer(call.tile_chunks)
    arguments.chunk_rows = _pointer(call.chunk_rows)
    arguments.row_keys = _pointer(call.row_keys)
    arguments.row_dropout = _pointer(call.row_dropout)
    arguments.dropout_key = call.dropout_key
    arguments.first_column = call.first_column
    for i, factor in enumerate(call.factors):
        arguments.factors[i] = factor.data_ptr()
        arguments.factor_rows[i] = factor.shape[0]
    for i, c in enumerate(call.columns):
        arguments.columns[i] = _Columns(c.groups, c.stride, c.begin, c.width)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _blocks(device: torch.device) -> int:
    """Thread blocks of a persistent grid: one a multiprocessor, in clusters of two."""
    return torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2


@functools.cache
def load_extension() -> Extension:
    """Returns the library, building it if the cache does not hold it.

    Raises:
        ExtensionUnavailable: if there is no CUDA compiler, or the build or the loading fails.
    """
    path = library_path()
    if not path.exists():
        build(path)
    try:
        return Extension(path)
    except OSError as error:
        raise ExtensionUnavailable(f"{path} cannot be loaded: {error}") from error


def cache_directory() -> Path:
    """Where built libraries lie: TLORA_CACHE_DIR, else the user's cache folder."""
    if "TLORA_CACHE_DIR" in os.environ:
        return Path(os.environ["TLORA_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tlora_megatron"


def library_path() -> Path:
    """The library that the present sources build: its name holds their hash."""
    digest = hashlib.sha256(" ".join((*_FLAGS, _ARCHITECTURE)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_directory() / f"kernels_{digest.hexdigest()[:16]}.so"


def find_compiler() -> str | None:
    """Path of nvcc: of CUDA_HOME, of PATH, or of the usual place; None where there is none."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [os.path.join(home, "bin", "nvcc") for home in (*named, "/usr/local/cuda")]
    candidates.insert(len(named), shutil.which("nvcc") or "")
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def build(path: Path) -> None:
    """Compiles `csrc/` into `path`; processes that build at once do not see each other's halves.

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
            command = [compiler, *_FLAGS, _ARCHITECTURE, *sources, "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ExtensionUnavailable(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
            os.replace(built, path)
    except OSError as error:
        raise ExtensionUnavailable(f"cannot build into {path.parent}: {error}") from error
