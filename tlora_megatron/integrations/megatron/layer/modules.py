"""Modules of somebody else's: given a class of our own in place, and searched for hooks.

Parameters, names, hooks and `isinstance` answers stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registry


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


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_PACKAGE = __name__.partition(".")[0]
_OF_DDP = "DistributedDataParallel._make_forward_pre_hook."
"""Begins the name of the hook that Megatron's DDP puts on every module under
`--overlap-param-gather`. It waits for the module's own trainable parameters, of which a frozen base
has none."""


def does_more(module: nn.Module) -> bool:
    """Returns True if calling a module does more than its class's `forward`."""
    return hangs_on(module) or hangs_on_all()


def hangs_on(module: nn.Module) -> bool:
    """Returns True if the module has hooks, another `forward` or a compiled one (`compile()`)."""
    # Spelled out: ten modules a layer are asked in each micro-batch, while a GPU may wait.
    own = module.__dict__
    return bool(
        (own["_forward_hooks"] and foreign_hook(own["_forward_hooks"]))
        or (own["_forward_pre_hooks"] and foreign_hook(own["_forward_pre_hooks"]))
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or own.get("_compiled_call_impl")
    )


def foreign_hook(hooks: Mapping[int, Any]) -> Any | None:
    """Returns the first hook that must see a module's call: not this package's, nor DDP's."""
    for hook in hooks.values():
        package = (getattr(hook, "__module__", None) or "").partition(".")[0]
        name = getattr(hook, "__qualname__", "")
        if package != _PACKAGE and not name.startswith(_OF_DDP):
            return hook
    return None


def what_hangs_on(modules: Iterable[nn.Module]) -> str | None:
    """Returns what waits for a call of the modules, named for a log; None if nothing does."""
    if hangs_on_all():
        return "a hook waits for all modules"
    module = next(filter(hangs_on, modules), None)
    if module is None:
        return None
    own, what = module.__dict__, "a forward or a compiled one of its own"
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        hook = foreign_hook(own[kind])
        if hook is not None:
            what = f"the hook {getattr(hook, '__qualname__', type(hook).__name__)}"
            break
    return f"{what} waits for {built_class(module).__name__}"


def hangs_on_all() -> bool:
    """Returns True if all modules have hooks (`register_module_forward_hook` and its like)."""
    return bool(
        registry._global_forward_hooks
        or registry._global_forward_pre_hooks
        or registry._global_backward_hooks
        or registry._global_backward_pre_hooks
    )


def packs_saved_tensors() -> bool:
    """Returns True if tensors that autograd saves go through hooks.

    That is so under `saved_tensors_hooks`, `save_on_cpu`, a checkpoint that does not re-enter, and
    Megatron's activation offloading.
    """
    return _saved_tensors_hooks(True) is not None
