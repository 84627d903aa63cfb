"""Gives a module of somebody else's a class made of its own and a mixin, in place.

Parameters, names, hooks and `isinstance` answers stay.
"""

from __future__ import annotations

import functools
from typing import Any


def mix(mixin: Any, module: Any) -> None:
    """Makes a module an instance of the mixin too; one that is stays as it is."""
    if not isinstance(module, mixin):
        base: Any = type(module)
        module.__class__ = _mixed(mixin, base)


@functools.cache
def _mixed(mixin: Any, base: Any) -> Any:
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": mixin.__module__})


def built_class(module: Any) -> type:
    """Returns the class that a module was built as, before this package mixed anything in."""
    package = __name__.split(".")[0] + "."
    return next(c for c in type(module).__mro__ if not c.__module__.startswith(package))
