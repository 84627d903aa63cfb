"""Lets Triton 3.6 interpret kernels under NumPy 2.4, which no longer takes `int(array([3]))`."""

from __future__ import annotations

import triton.language as tl
from triton.runtime import interpreter


def accept_numpy_scalars() -> None:
    """Makes scalars of interpreted kernels usable as bounds of loops."""
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: type[tl.tensor], scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
