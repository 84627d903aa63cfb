"""The messages of Tinker's protobuf, without an import of its SDK, which would load torch."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_NAME = "tinker.proto.tinker_public_pb2"
INSTALL = "Tinker's protocol needs its messages: pip install 'tlora-megatron[tinker]'"


def is_installed() -> bool:
    """True if the package `tinker` is there."""
    return find_spec("tinker") is not None


@cache
def messages() -> Any:
    """The module of the generated message classes.

    Raises:
        ImportError: if the package `tinker` is missing.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = find_spec("tinker")
    if package is None or not package.submodule_search_locations:
        raise ImportError(INSTALL)
    file = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    # Under a name of its own: a later import of the SDK finds its own module, and equal messages.
    spec = spec_from_file_location("tlora_megatron_tinker_messages", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(INSTALL)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
