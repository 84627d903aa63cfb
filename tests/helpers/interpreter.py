"""Where Triton's kernels run in tests; and lets Triton 3.6 interpret them under NumPy 2.4, faster.

Triton chooses its interpreter when it is imported, so kernels are interpreted in processes of their
own: `TRITON_INTERPRET=1 pytest` on a file runs its kernels here. Importing this module there
readies the interpreter.

NumPy no longer takes `int(array([3]))`. And Triton looks through its whole language again at every
call of a device function, makes a table of all types for every one that it looks up, and computes
in 64 bits whether sums of whole numbers overflow, for assertions that it leaves out. And it wraps
and names the same few shapes for every value that it computes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
RUNS = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in the process of test_interpreted_kernels"
)
"""On a GPU kernels run as they are."""
COMPILES = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter


def compiled_for(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, int],
    *,
    capability: int = 90,
    num_warps: int = 8,
) -> dict[str, str]:
    """Returns what the compiler makes of a kernel, by stage; needs no GPU."""
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    names = kernel.arg_names
    source = compiler.ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in types if "*" in types[n]},
    )
    return compiler.compile(source, target=target, options={"num_warps": num_warps}).asm


def _ready_interpreter() -> None:
    """Makes scalars usable as bounds of loops, and interpretation faster."""
    _accept_numpy_scalars()
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    _remember_shapes()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _accept_numpy_scalars() -> None:
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: type[tl.tensor], scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _once_a_launch(
    patch: Callable[[Any], interpreter._LangPatchScope],
) -> Callable[[Any], interpreter._LangPatchScope]:
    """Patches each module of the language once between a kernel's begin and end.

    A kernel's functions see `triton.language`, those of Triton's own library its `core`.
    """
    launch, done = interpreter._LangPatchScope(), set[str]()

    def patch_lang(fn: Any) -> interpreter._LangPatchScope:
        nonlocal launch
        seen = _languages(fn)
        if not launch._changes:  # the last kernel's end has taken them back
            done.clear()
            launch = patch(fn)
        elif not seen <= done:
            patch(fn)
        else:
            return interpreter._LangPatchScope()
        done.update(seen)
        return launch

    return patch_lang


@functools.cache
def _languages(fn: Any) -> frozenset[str]:
    modules = (value for value in fn.__globals__.values() if value is tl or value is tl.core)
    return frozenset(module.__name__ for module in modules)


def _remembered(find: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    known = functools.cache(find)

    def dtype_of(kind: Any) -> np.dtype[Any]:
        # Other types than scalars have no hash.
        return known(kind) if type(kind) is tl.dtype else find(kind)

    return dtype_of


def _remember_shapes() -> None:
    """Makes what follows from a shape once: its size and name, and each number as a constant."""
    make_block, shapes = tl.block_type.__init__, dict[tuple[Any, ...], tuple[Any, int, str]]()

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        numbers = _unwrapped(shape)
        if numbers not in shapes:
            make_block(self, element_ty, shape)
            shapes[numbers] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, said = shapes[numbers]
        self.name = f"<{said}, {element_ty}>"

    @functools.cache
    def constants(*numbers: int) -> tuple[tl.tuple, tl.constexpr]:
        wrapped = tl.tuple([tl.constexpr(number) for number in numbers])
        return wrapped, tl.constexpr(math.prod(numbers))

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(*(type.shape if type.is_block() else ()))

    compare = tl.tuple.__eq__

    def are_equal(self: tl.tuple, other: Any) -> tl.constexpr:
        if not isinstance(other, (tuple, list, tl.tuple)):
            return compare(self, other)
        return tl.constexpr(_unwrapped(self) == _unwrapped(other))

    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor
    tl.tuple.__eq__ = are_equal


def _unwrapped(shape: Any) -> tuple[Any, ...]:
    return tuple(x.value if type(x) is tl.constexpr else x for x in shape)


if INTERPRETED:
    _ready_interpreter()
