"""Words of the command line that `tlora serve` and its HTTP process share: keeping, the sampler."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

from tlora_megatron.config.reader import must
from tlora_megatron.service.bases import base_section
from tlora_megatron.service.home import Home
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.sampling.sampler import Sampler

_DAYS = 30.0
_LEAST_DAYS = 1.0
"""Answers are kept for a day, whatever becomes of the session."""
_DAY_S = 86_400.0
KEEP_SESSIONS_S = _DAYS * _DAY_S


def add_keeping_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the words to `tlora serve`, and to the process of HTTP that it starts."""
    parser.add_argument(
        "--keep-sessions",
        type=float,
        default=_DAYS,
        metavar="DAYS",
        help="keep sessions of Tinker's clients for so long after their end; checkpoints stay "
        f"(default: {_DAYS:g})",
    )


def keeping_words(args: argparse.Namespace) -> list[str]:
    """The same words again, for a process that is started."""
    return ["--keep-sessions", str(args.keep_sessions)]


def keep_sessions_s(args: argparse.Namespace) -> float:
    """Seconds for which sessions are kept.

    Raises:
        ConfigError: if they are too few.
    """
    if not args.keep_sessions >= _LEAST_DAYS:
        raise must("--keep-sessions", f"be at least {_LEAST_DAYS:g} day", args.keep_sessions)
    return float(args.keep_sessions * _DAY_S)


KINDS = ("own", "vllm", "off")
MAY_DIFFER = "--sampler-may-differ"


def add_sampler_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the words to `tlora serve`, and to the process of HTTP that it starts."""
    parser.add_argument(
        "--sampler",
        choices=KINDS,
        default="own",
        help="what generates text over HTTP: own (a small exact generator), vllm, or off "
        "(default: own)",
    )
    parser.add_argument(
        "--sampler-gpu",
        metavar="N",
        help="number of the GPU that the sampler has to itself; leave it out of the service's "
        "(default: own samples on the CPU)",
    )
    parser.add_argument(
        "--sampler-address",
        metavar="URL",
        help="vLLM server that runs already and serves each base under its name; its key is read "
        "from VLLM_API_KEY (default: vllm serve is started for each base)",
    )
    parser.add_argument(
        MAY_DIFFER,
        action="store_true",
        help="sample also where the server at --sampler-address holds a base in another dtype or "
        "quantisation than it is trained in (default: that is refused)",
    )


def sampler_words(args: argparse.Namespace) -> list[str]:
    """The same words again, for a process that is started."""
    given = {"--sampler-gpu": args.sampler_gpu, "--sampler-address": args.sampler_address}
    more = [word for name, value in given.items() if value is not None for word in (name, value)]
    if args.sampler_may_differ:
        more.append(MAY_DIFFER)
    return ["--sampler", args.sampler, *more]


def open_sampler(
    args: argparse.Namespace, home: Home, say: Callable[[str], None] = lambda _: None
) -> Sampler | None:
    """The sampler that was chosen; nothing is started before somebody asks it.

    Its `close` must be called at the end.

    Args:
        say: is told, on a thread, how like the bases that train a server's are.

    Raises:
        ConfigError: for words that do not go together.
    """
    if args.sampler_address is not None and args.sampler != "vllm":
        raise must("--sampler-address", "be given with --sampler vllm", args.sampler_address)
    if args.sampler_may_differ and args.sampler_address is None:
        raise must(MAY_DIFFER, "be given with --sampler-address", True)
    if args.sampler == "off":
        return None
    folder, base_of = home.root / "sampler", partial(base_section, home)
    if args.sampler == "own":
        return OwnSampler(folder, base_of, OwnSettings(gpu=args.sampler_gpu))
    # Not at the top: our own sampler needs no httpx.
    from tlora_megatron.service.sampling.vllm.probe import ProbeSettings
    from tlora_megatron.service.sampling.vllm.sampler import VllmSampler
    from tlora_megatron.service.sampling.vllm.server import Server, VllmSettings

    running = probe = None
    if args.sampler_address is not None:
        running = Server(args.sampler_address.rstrip("/"), os.environ.get("VLLM_API_KEY"))
        probe = ProbeSettings(home=home, may_differ=args.sampler_may_differ, say=say)
    return VllmSampler(folder, base_of, VllmSettings(gpu=args.sampler_gpu), running, probe)
