"""`tlora serve --http`: the service's doors for other programs and for browsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tlora_megatron.config.reader import must
from tlora_megatron.service.bases import check_bases, declare_bases
from tlora_megatron.service.home import Home
from tlora_megatron.service.keeping import (
    add_keeping_arguments,
    keep_sessions_s,
    keeping_words,
)
from tlora_megatron.service.sampling.arguments import add_sampler_arguments, sampler_words

if TYPE_CHECKING:
    from tlora_megatron.service.store import Store


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of HTTP to those of `tlora serve`."""
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="listen for HTTP: a page, /v1/jobs, and the clients of OpenAI and Tinker; without "
        "HOST for this host alone (127.0.0.1)",
    )
    parser.add_argument(
        "--base",
        action="append",
        default=[],
        dest="bases",
        metavar="NAME=DIR",
        help="let jobs that come by HTTP name this base; DIR, or a YAML file with the section "
        "base_model; remembered in the service's folder (repeatable)",
    )
    add_sampler_arguments(parser)
    add_keeping_arguments(parser)


def check_http(args: argparse.Namespace) -> None:
    """Refuses what is wrong before anything is made.

    Raises:
        ConfigError: for an address, a base or a number of days that cannot be, or a port in use.
    """
    _check_together(args)
    check_bases(args.bases)
    keep_sessions_s(args)
    if args.http is not None:
        from tlora_megatron.service.front import Place, listen

        listen(Place.read(args.http)).close()  # it is taken when all else is ready


def _check_together(args: argparse.Namespace) -> None:
    """Refuses options that others leave without an effect."""
    parser = argparse.ArgumentParser()
    add_sampler_arguments(parser)
    add_keeping_arguments(parser)
    defaults = vars(parser.parse_args([]))
    given = {
        name: value for name, value in vars(args).items() if value != defaults.get(name, value)
    }
    without = "without --http" if args.http is None else ""
    for name, value in given.items():
        if not without and name == "sampler_address" and args.sampler != "vllm":
            raise must("--sampler-address", "be given with --sampler vllm", value)
        if args.sampler == "off" and name == "sampler_gpu":
            without = "with --sampler off"
        if args.sampler_address is not None and name == "sampler_gpu":
            without = "with --sampler-address, whose server has its own GPU"
        if without:
            raise must(f"--{name.replace('_', '-')}", f"be left out {without}", value)


@contextmanager
def open_http(
    args: argparse.Namespace, home: Home, store: Store, say: Callable[[str], None]
) -> Iterator[None]:
    """Serves HTTP meanwhile, where it was asked for.

    Args:
        args: of the command line.
        home: of the service.
        store: of the service.
        say: prints a line.

    Raises:
        ConfigError: if the address cannot be used, or a base cannot be read.
        ImportError: if the libraries are missing.
    """
    declare_bases(home, args.bases)
    if args.http is None:
        yield
        return
    import tlora_megatron.service.api  # noqa: F401  says what is missing
    from tlora_megatron.service.front import Front, Place, listen, own_token

    place = Place.read(args.http)
    listener = listen(place)
    place = place._replace(port=listener.getsockname()[1])
    words = [*sampler_words(args), *keeping_words(args)]
    with Front(home, listener, words=words, say=say):
        say(f"page: {place.url}/#token={own_token(home, store)}")
        if not place.is_loopback:
            say("other hosts can connect, and nothing is encrypted: put a proxy with TLS before it")
        yield
