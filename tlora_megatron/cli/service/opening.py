"""Opens a service's folder for a command, and finds the jobs that the command names."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.service import home
from tlora_megatron.service.home import DATABASE, store_place

if TYPE_CHECKING:
    from tlora_megatron.service.store import Store


@dataclass(frozen=True, slots=True)
class Service:
    """A service as a command sees it: its folder and its store."""

    home: home.Home
    store: Store

    @property
    def is_served(self) -> bool:
        """True while a controller gives signs of life."""
        return self.store.lock.is_held()

    @property
    def how_to_serve(self) -> str:
        """The command that starts a controller of this service."""
        return serve_command(self.home.root)


def add_service_argument(parser: argparse.ArgumentParser, *, also: str = "") -> None:
    """Adds `--service`."""
    parser.add_argument(
        "--service",
        metavar="DIR",
        help=f"folder of the service{also and f', {also}'} (default: ${home.VARIABLE}, or "
        f"{home.DEFAULT})",
    )


@contextmanager
def open_service(args: argparse.Namespace) -> Iterator[Service]:
    """Opens the service that `--service` names; it must be there.

    Raises:
        ConfigError: if nobody has served that folder yet, or inside the block the store refuses
            what is asked: a mistake of the command line. Trouble of the store itself is none.
    """
    root = service_folder(args.service)
    if not any((root / name).is_file() for name in ("store.sqlite", DATABASE)):
        named = args.service or os.environ.get(home.VARIABLE) or ""
        looks_remote = re.fullmatch(r"[\w.-]+:\d+/?", named) is not None
        remedy = f"start one with: {serve_command(root)}"
        remedy = f"an address begins with http://, as in http://{named}" if looks_remote else remedy
        raise must("--service", "be the folder of a service", str(root), remedy)
    # Not at the top: it takes a third of a second, and `--help` needs none of it.
    from tlora_megatron.service.store import Refusal, open_store

    found = home.Home.open(root)
    with open_store(store_place(found)) as store:
        try:
            yield Service(found, store)
        except Refusal as error:
            raise ConfigError(str(error)) from error


def is_address(service: str) -> bool:
    """True of a service over HTTP."""
    return service.startswith(("http://", "https://"))


def service_folder(given: str | None) -> Path:
    """The folder that `--service`, the environment or the default names; it may be missing.

    Raises:
        ConfigError: if it is an address.
    """
    named = given or os.environ.get(home.VARIABLE) or home.DEFAULT
    if is_address(named):
        raise must("--service", "be a folder of this host for this command", named)
    return Path(named).expanduser().absolute()


def serve_command(root: Path) -> str:
    """Returns the shortest command that serves a folder."""
    named = os.environ.get(home.VARIABLE) or home.DEFAULT
    is_default = not is_address(named) and root == service_folder(named)
    return "tlora serve" if is_default else f"tlora serve --service {root}"
