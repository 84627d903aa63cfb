"""Settings of a controller, and the options that `tlora serve` and its HTTP process share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tlora_megatron.config.reader import must
from tlora_megatron.scheduler.registry import DEFAULT_POLICY
from tlora_megatron.service.bases import base_section
from tlora_megatron.service.home import Home
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a controller schedules, and how long it waits."""

    policy: str = DEFAULT_POLICY
    """Name in `scheduler.registry.POLICIES`."""
    hardware: str | None = None
    """Hardware profile, a name or a path; None: that of the GPU, else the rough one of CPUs."""
    database: str | None = None
    """Address of the store; None: `store.sqlite` in the service's folder."""
    max_group_size: int = 16
    lookahead: int = 128
    """Waiting jobs that a decision looks at."""
    data_root: str | None = None
    """Jobs may name files below this folder only, and through no link; None: any that can be read.
    """
    micro_batch_tokens: int = 4096
    """Tokens by which portions of jobs are chosen: no gang's micro-batch is smaller."""

    tick_s: float = 10.0
    """A decision is made at least so often."""
    coalesce_s: float = 0.1
    """Time after a change in which further ones are decided about together with it."""
    poll_s: float = 0.04
    """Time between two looks at engine and store."""
    look_s: float = 10.0
    """Time between two looks at machines, unknown gangs, and gangs that are silent."""

    idle_keep_s: float = 600.0
    """How long a gang without jobs keeps its GPUs while no group wants them."""
    lease_s: float = 600.0
    """A gang stops writing when no controller has sent it anything for so long."""
    checkpoint_every_s: float = 60.0
    hang_s: float = 600.0
    """A gang with jobs that sends no event for so long is killed and started again."""
    stop_s: float = 300.0
    """A gang that was asked to stop and has not ended after so long is killed."""

    dwell_s: float = 60.0
    """A group that was moved or resized stays so at least so long."""
    regroups_per_min: int = 4
    """Most moves and resizes in the cluster in a minute; jobs that join or start do not count."""
    gain_over_cost: float = 3.0
    """A regrouping must bring so many times the tokens that its pause costs."""

    max_deaths: int = 3
    """Deaths of its gangs, without a step between them, after which a job trains alone or fails."""
    max_failed_saves: int = 2
    """Failed saves in a row after which a job is paused."""
    end_gangs: bool = False
    """Save and stop all gangs when the controller is to stop; else they train on."""
    end_gangs_s: float = 30.0
    decide_in_thread: bool = True


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
    from tlora_megatron.service.sampling.vllm_probe import ProbeSettings
    from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
    from tlora_megatron.service.sampling.vllm_server import Server, VllmSettings

    running = probe = None
    if args.sampler_address is not None:
        running = Server(args.sampler_address.rstrip("/"), os.environ.get("VLLM_API_KEY"))
        probe = ProbeSettings(home=home, may_differ=args.sampler_may_differ, say=say)
    return VllmSampler(folder, base_of, VllmSettings(gpu=args.sampler_gpu), running, probe)
