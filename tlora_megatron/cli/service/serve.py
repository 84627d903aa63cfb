"""`tlora serve`: runs a service that trains jobs as they come, over HTTP too if it is asked to."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tlora_megatron.cli.service.board import Board
from tlora_megatron.cli.service.in_folder import add_service_argument, service_folder
from tlora_megatron.cli.tables import JsonConsole, open_console
from tlora_megatron.config.reader import must
from tlora_megatron.scheduler.registry import DEFAULT_POLICY, POLICIES
from tlora_megatron.service.home import Home, remember_store, store_place
from tlora_megatron.service.logs import add_log_format, kept_log, log
from tlora_megatron.service.settings import (
    SERVERS,
    add_passed_on_arguments,
    check_bases,
    check_sampler,
    declare_bases,
    keep_sessions_s,
    passed_on_words,
    read_age_s,
)

if TYPE_CHECKING:
    from tlora_megatron.service.engines.base import GangEngine
    from tlora_megatron.service.store import Store


def check_http(args: argparse.Namespace) -> None:
    """Refuses, before anything is made, an address, base or number of days that cannot be."""
    _check_together(args)
    check_bases(args.bases)
    keep_sessions_s(args)
    if args.http is not None:
        check_sampler(args)
    for url in args.sampler_address:
        place = urlsplit(url)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise must("--sampler-address", "be a URL such as http://127.0.0.1:8000", url)
    if args.sampler_words is not None:
        from tlora_megatron.service.sampling.vllm_server import VllmSettings

        words = VllmSettings().with_words(args.sampler_words).words
        if args.sampler_address and words:
            what = "hold --max-loras and --max-lora-rank alone of servers at --sampler-address"
            raise must("--sampler-words", what, args.sampler_words)
    if args.http is not None:
        from tlora_megatron.service.front import Place, listen

        listen(Place.read(args.http)).close()  # it is taken when all else is ready


def _check_together(args: argparse.Namespace) -> None:
    """Refuses options that others leave without an effect."""
    parser = argparse.ArgumentParser()
    add_passed_on_arguments(parser)
    defaults = vars(parser.parse_args([]))
    given = {
        name: value for name, value in vars(args).items() if value != defaults.get(name, value)
    }
    without = "without --http" if args.http is None else ""
    for name, value in given.items():
        of_servers = name in ("sampler_address", "sampler_words") and args.sampler not in SERVERS
        if of_servers and not without:
            rule = f"be given with --sampler {' or '.join(SERVERS)}"
            raise must(f"--{name.replace('_', '-')}", rule, value)
        if args.sampler == "off" and name == "sampler_gpu":
            without = "with --sampler off"
        if args.sampler_address and name == "sampler_gpu":
            without = "with --sampler-address, whose server has its own GPU"
        if without:
            raise must(f"--{name.replace('_', '-')}", f"be left out {without}", value)


@contextmanager
def open_http(
    args: argparse.Namespace, home: Home, store: Store, say: Callable[[str], None]
) -> Iterator[None]:
    """Serves HTTP meanwhile, where it was asked for.

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
    words = [*passed_on_words(args), "--log-format", args.log_format]
    with Front(home, listener, words=words, say=say):
        token = own_token(home, store)
        logs_secrets = args.log_format == "text"
        say(f"page: {place.url}/" + (f"#token={token}" if logs_secrets else ""))
        if not place.is_loopback:
            say("other hosts can connect, and nothing is encrypted: put a proxy with TLS before it")
        yield


logger = logging.getLogger(__name__)

ENGINES = ("local", "ray", "slurm")
_EPILOG = """\
examples:
  tlora serve                                  # this machine's GPUs, or its CPU
  tlora serve --service /data/tlora --gpus 4 --policy tlora
  tlora serve --http 8017 --base llama=/models/llama-8b     # with a page and HTTP
  tlora serve --leave-gangs                    # Ctrl-C ends the controller alone; jobs train on

In another terminal: `tlora submit jobs.yaml`, `tlora jobs`, `tlora logs -f NAME`.

Ctrl-C or SIGTERM saves all jobs and ends their processes; the next `tlora serve` continues. A
second one does not wait for that: what was asked to save and end does so alone.

exit code: 0 stopped as asked, 1 a failure, 2 a mistake in the command line, 130 second Ctrl-C
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="run a service that trains jobs as they come",
        description="Runs a service in the foreground: it trains the jobs that `tlora submit` "
        "hands over, groups them on the GPUs, and keeps them through faults.",
        epilog=_EPILOG,
    )
    add_service_argument(parser)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help="what starts processes: local (this machine), ray or slurm (default: local)",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="use N GPUs, or N processes on a machine without any (default: all GPUs; without "
        "any, as many processes as cores)",
    )
    parser.add_argument(
        "--policy",
        choices=list(POLICIES),
        default=DEFAULT_POLICY,
        help=f"who trains beside whom, and on how many GPUs (default: {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--hardware",
        metavar="PROFILE",
        help="name or file of a hardware profile (default: by the GPU's name)",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        help="PostgreSQL database that holds the store, for users on several hosts; remembered in "
        "the service's folder (default: SQLite in that folder)",
    )
    parser.add_argument(
        "--data-root",
        metavar="DIR",
        help="refuse jobs that name files, adapters or a base outside of DIR or reach them by "
        "links (default: whatever you can read)",
    )
    parser.add_argument(
        "--prepare-processes",
        type=int,
        default=2,
        metavar="N",
        help="processes at most that check and tokenize submitted jobs, half a gigabyte of memory "
        "each; files of over 4 MiB leave one of them to the others (default: 2)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="save each running job so often; a job's service.checkpoint_every_s goes before it "
        "(default: 60)",
    )
    parser.add_argument(
        "--keep-finished",
        metavar="AGE",
        help="remove jobs with all their files so long after their ends, and their checkpoints "
        "after a quarter of that time: 30d, 12h; service.keep_days of a job may be shorter "
        "(default: keep them)",
    )
    parser.add_argument(
        "--leave-gangs",
        action="store_true",
        help="let jobs train on when the controller is stopped; the next one takes them up",
    )
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
    add_passed_on_arguments(parser)
    add_log_format(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    from tlora_megatron.service.control.controller import serve
    from tlora_megatron.service.control.pricing import check_hardware
    from tlora_megatron.service.session_files import take_up_sessions
    from tlora_megatron.service.settings import Settings
    from tlora_megatron.service.store import open_store

    if args.gpus is not None and args.gpus < 1:
        raise must("--gpus", "be at least 1", args.gpus)
    if args.prepare_processes < 1:
        raise must("--prepare-processes", "be at least 1", args.prepare_processes)
    if not args.checkpoint_every > 0:
        raise must("--checkpoint-every", "be above 0 seconds", args.checkpoint_every)
    kept = args.keep_finished
    keep_finished_s = math.inf if kept is None else read_age_s(kept, "--keep-finished")
    if args.data_root is not None and not Path(args.data_root).is_dir():
        raise must("--data-root", "be an existing folder", args.data_root)
    settings = Settings(
        policy=args.policy,
        hardware=args.hardware,
        data_root=args.data_root and str(Path(args.data_root).resolve()),
        prepare_processes=args.prepare_processes,
        checkpoint_every_s=args.checkpoint_every,
        end_gangs=not args.leave_gangs,
        sampler_gb=args.sampler_memory or 0.0,
        keep_finished_s=keep_finished_s,
    )
    check_hardware(settings)
    check_http(args)
    os.umask(0o077)  # for all files of the service, by whichever of its processes
    home = Home.open(service_folder(args.service))
    place = store_place(home, args.database)
    with (
        kept_log(home.root, args.log_format),
        open_store(place) as store,
        _stop_by_signal() as stop,
    ):
        remember_store(home, place)
        # An engine ends what it finds half dead: another controller's engine must not be there.
        store.lock.take()
        engine = _make_engine(args, home)
        try:
            title = _title(args, home, engine)
            console = JsonConsole() if args.log_format == "json" else open_console()

            def say(sentence: str) -> None:
                log(sentence)
                console.print(sentence)

            for sentence in take_up_sessions(home, store):
                say(sentence)
            say(f"serving {title}; Ctrl-C stops")
            with (
                open_http(args, home, store, say),
                Board(store, console, title) as board,
            ):
                store.lock.release()
                serve(home.root, engine, settings=settings, stop=stop, store=store, said=board.say)
        finally:
            engine.close()  # gangs go on
        say(
            "stopped; `tlora serve` continues the jobs that are not at their ends"
            if settings.end_gangs
            else "stopped; jobs train on, and `tlora serve` takes them up again"
        )
    return 0


def _title(args: argparse.Namespace, home: Home, engine: GangEngine[Any]) -> str:
    nodes = engine.nodes()
    count = sum(node.gpus for node in nodes)
    places = "1 place" if count == 1 else f"{count} places"
    on = "" if len(nodes) == 1 else f" on {len(nodes)} machines"
    return f"{home.root} by engine {args.engine} with {places}{on}, policy {args.policy}"


@contextmanager
def _stop_by_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; the second signal ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _make_engine(args: argparse.Namespace, home: Home) -> GangEngine[Any]:
    if args.engine == "local":
        from tlora_megatron.service.engines.local import LocalEngine
        from tlora_megatron.service.engines.protocol import WorkerSlots

        has_gpus = bool(WorkerSlots.of_host(None, None).devices)
        return LocalEngine(home.root, **{"gpus" if has_gpus else "slots": args.gpus})
    if args.engine == "slurm":
        from tlora_megatron.service.engines.slurm_engine import SlurmEngine

        return SlurmEngine(home.root, args.gpus)
    from tlora_megatron.service.engines.ray.engine import RayEngine

    if args.gpus is not None:
        logger.warning(
            "--gpus %d changes nothing with --engine ray: Ray knows its nodes", args.gpus
        )
    return RayEngine(home.root)
