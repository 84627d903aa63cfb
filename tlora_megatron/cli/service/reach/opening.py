"""Opens the service that a command names, wherever it is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tlora_megatron.cli.service.opening import add_service_argument, is_address, open_service
from tlora_megatron.cli.service.reach.in_folder import FolderService
from tlora_megatron.cli.service.reach.over_http import open_address
from tlora_megatron.cli.service.reach.ports import Service
from tlora_megatron.service.home import VARIABLE


def add_reach_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--service` for a command that also reaches services over HTTP."""
    add_service_argument(
        parser, also="or its address, http://HOST:PORT, with a token in TLORA_TOKEN"
    )


@contextmanager
def reach_service(args: argparse.Namespace) -> Iterator[Service]:
    """Opens the service that `--service` names, a folder or an address.

    Raises:
        ConfigError: as `open_service` and `open_address` do.
    """
    named = args.service or os.environ.get(VARIABLE) or ""
    if is_address(named):
        with open_address(named) as service:
            yield service
        return
    with open_service(args) as found:
        yield FolderService(found.home, found.store, found.how_to_serve)
