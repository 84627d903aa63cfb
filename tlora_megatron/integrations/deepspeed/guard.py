"""Checks before a run that DeepSpeed has the version, names and arguments that we rely on.

No method of DeepSpeed is overridden. Its model has nothing to train, so that of ZeRO only the hooks
that gather and release frozen weights run, and of AutoTP the sharding and the groups.
"""

from __future__ import annotations

import importlib
import inspect
import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = (0, 18, 0)
NEXT = (0, 20, 0)
"""The first release that is not supported."""
OLDEST_WITH_AUTOTP = (0, 19, 8)
"""Before it AutoTP has another call, or knows not all of transformers' plans, or no ZeRO-3."""

_RELIED_ON: dict[str, tuple[str, ...]] = {
    "deepspeed.initialize": ("model", "config"),
    "deepspeed.init_distributed": ("dist_backend",),
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": ("module", "ds_config"),
    "deepspeed.module_inject.layers.LinearLayer": ("mp_group",),
    "deepspeed.module_inject.layers.LinearAllreduce": ("mp_group",),
    "deepspeed.utils.groups.get_tensor_model_parallel_group": (),
    "deepspeed.utils.groups.get_data_parallel_group": (),
    "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig": (),
    "deepspeed.ops.__compatible_ops__": (),
}
"""Dotted name -> arguments that it must take."""


def check_deepspeed(tp_size: int = 1) -> None:
    """Refuses a DeepSpeed that is missing, of an untried version, or without what is relied on.

    Args:
        tp_size: over 1 needs AutoTP.

    Raises:
        ImportError: if it is missing.
        RuntimeError: naming the version or the name that does not fit.
    """
    try:
        installed = version("deepspeed")
    except PackageNotFoundError as error:
        raise ImportError(
            "DeepSpeed is missing: pip install 'tlora-megatron[deepspeed]'"
        ) from error
    check_version(installed, tp_size)
    for name, arguments in _RELIED_ON.items():
        _check_name(name, arguments, installed)


def check_version(installed: str, tp_size: int = 1) -> None:
    """Refuses a release out of the supported range.

    Raises:
        RuntimeError: naming the range.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    oldest, what = (OLDEST, "") if tp_size == 1 else (OLDEST_WITH_AUTOTP, " under AutoTP")
    if not oldest <= numbers < NEXT:
        low, high = (".".join(map(str, v)) for v in (oldest, NEXT))
        raise RuntimeError(f"DeepSpeed{what} must be >={low},<{high}, got {installed}")


def _check_name(name: str, arguments: tuple[str, ...], installed: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"deepspeed must have {name}, got {installed} without it") from error
    taken = inspect.signature(found).parameters if arguments else {}
    for argument in arguments:
        if argument not in taken:
            raise RuntimeError(
                f"{name} must take {argument}, got {', '.join(taken)} in deepspeed {installed}"
            )
