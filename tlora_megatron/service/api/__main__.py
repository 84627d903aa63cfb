"""The process of HTTP of one service; `tlora serve --http` starts it, and again if it dies."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence

from tlora_megatron.service.api.server import make_app, make_server, prepare_process
from tlora_megatron.service.api.service import Service
from tlora_megatron.service.front import Place, listen
from tlora_megatron.service.home import Home, store_place
from tlora_megatron.service.logs import LogFile, add_log_format, formatter
from tlora_megatron.service.settings import (
    add_passed_on_arguments,
    keep_sessions_s,
    open_sampler,
)
from tlora_megatron.service.store import open_store


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until a signal, or until the end of a parent that has asked to be watched."""
    args = _parser().parse_args(argv)
    os.umask(0o077)
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(formatter(args.log_format, "http: %(levelname)s: %(message)s"))
    home = Home.open(args.folder)
    handlers = [handler, LogFile(home.root, args.log_format)]
    logging.basicConfig(level=logging.WARNING, handlers=handlers)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of strangers' bytes
    listener = listen(Place.read(args.http)) if args.fd is None else socket.socket(fileno=args.fd)
    with open_store(store_place(home)) as store:

        def say(message: str) -> None:
            store.events.add("said", body={"what": "sampler", "message": message})

        sampler = open_sampler(args, home, say)
        service = Service.of(home, store, sampler=sampler, keep_sessions_s=keep_sessions_s(args))
        if sampler is not None:
            service.openers.append(sampler.open)
            service.closers.append(sampler.close)
        place = Place(*listener.getsockname()[:2])
        server = make_server(make_app(service, place.names(args.allow_host)))
        prepare_process()

        def end_with_parent() -> None:
            sys.stdin.buffer.read()
            server.should_exit = True

        if args.watch_stdin:
            threading.Thread(target=end_with_parent, daemon=True).start()
        server.run(sockets=[listener])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tlora_megatron.service.api")
    parser.add_argument("folder", help="of the service")
    parser.add_argument("--http", default="8017", help="[HOST:]PORT")
    parser.add_argument("--fd", type=int, help="socket that listens already, instead of --http")
    parser.add_argument(
        "--watch-stdin", action="store_true", help="end when the standard input ends"
    )
    add_passed_on_arguments(parser)
    add_log_format(parser)
    return parser


if __name__ == "__main__":
    main()
