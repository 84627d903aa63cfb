"""Lets Triton 3.6 interpret kernels under NumPy 2.4, in half of the time.

NumPy no longer takes `int(array([3]))`. And Triton looks through its whole language again at every
call of a device function, makes a table of all types for every one that it looks up, and computes
in 64 bits whether sums of whole numbers overflow, for assertions that it leaves out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def ready_interpreter() -> None:
    """Makes scalars usable as bounds of loops, and interpretation faster; call it once."""
    _accept_numpy_scalars()
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
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
