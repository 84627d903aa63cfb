"""Makes the adapters of a Megatron-Bridge checkout importable without all that it requires."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from scripts.bench.harness.clock import is_main


def load_bridge(source: Path) -> str:
    """Makes `megatron.bridge.peft` importable; returns Megatron-Bridge's version.

    `megatron.bridge` itself would import its models, and with them half of its requirements: it
    becomes an empty package. Of its utilities, the adapters need a print.

    Args:
        source: folder with `megatron/bridge/peft`, `utils` and `package_info.py`.
    """
    os.environ["NO_VCS_VERSION"] = "1"  # or it asks the git of another repository
    package = _module("megatron.bridge")
    package.__path__ = [str(source / "megatron" / "bridge")]
    _module("megatron.bridge.utils.common_utils").print_rank_0 = (  # type: ignore[attr-defined]
        lambda text: print(text) if is_main() else None
    )
    absent = not importlib.util.find_spec("transformer_engine")
    if absent:  # it is imported for the class of one annotation
        engine = _module("transformer_engine.pytorch")
        engine.ops = SimpleNamespace(Sequential=object)  # type: ignore[attr-defined]
        _module("transformer_engine").pytorch = engine  # type: ignore[attr-defined]
    importlib.import_module("megatron.bridge.peft.lora")
    if absent:
        del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
        # It takes the names that megatron-core then has for classes.
        sys.modules["megatron.bridge.peft.utils"].HAVE_TE = False  # type: ignore[attr-defined]
    return str(importlib.import_module("megatron.bridge.package_info").__version__)


def _module(name: str) -> ModuleType:
    sys.modules[name] = module = ModuleType(name)
    return module
