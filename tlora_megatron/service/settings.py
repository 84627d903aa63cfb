"""Base models that a service offers by name, so that nobody names a path over the network."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tlora_megatron.config.documents import read_document
from tlora_megatron.config.reader import must, read_spec
from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.config.sections import plain, read_base_model
from tlora_megatron.files import read_json, write_json
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import GPT_OSS
from tlora_megatron.runtime.sampling.values import SamplerLimits
from tlora_megatron.scheduler.registry import DEFAULT_POLICY
from tlora_megatron.service.home import JOB_NAME, Home
from tlora_megatron.service.sampling.own import OwnSampler, OwnSettings
from tlora_megatron.service.sampling.sampler import Sampler

BASES_NAME = "bases.json"
"""In the service's folder: name -> section `base_model` with absolute paths."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}")


def read_bases(home: Home) -> dict[str, BaseModelSpec]:
    """The bases that a service offers; nothing looks whether their files are there."""
    found = read_json(home.root / BASES_NAME) or {}
    return {name: read_spec(BaseModelSpec, section, name) for name, section in found.items()}


def check_bases(words: Sequence[str]) -> None:
    """Reads bases as `declare_bases` does, and adds none."""
    for word in words:
        _read_word(word)


def declare_bases(home: Home, words: Sequence[str]) -> None:
    """Adds or replaces bases `NAME=DIR`, or `NAME=FILE` with a section; none at a mistake."""
    added = dict(_read_word(word) for word in words)
    if added:
        known = read_json(home.root / BASES_NAME) or {}
        write_json(home.root / BASES_NAME, {**known, **added})


def _read_word(word: str) -> tuple[str, Mapping[str, Any]]:
    name, _, place = word.partition("=")
    if not place or not _NAME.fullmatch(name):
        rule = "be NAME=DIR or NAME=FILE.yaml, NAME of letters, digits and . _ / -"
        raise must("--base", rule, word)
    path = Path(place).expanduser()
    if path.is_file():
        document = read_document(path)
        base = read_base_model(document.get("base_model", document), path.resolve().parent)
    else:
        base = read_base_model({"path": place}, Path.cwd())
    _refuse_gpt_oss(word, base)
    section: dict[str, Any] = plain(base)
    return name, section


def _refuse_gpt_oss(word: str, base: BaseModelSpec) -> None:
    """Refuses a base over which a service trains and samples nothing."""
    try:
        kind = read_model_spec(base.config_file).model_type
    except ValueError:
        return  # its first job says what else is wrong with it
    if kind == GPT_OSS:
        rule = f"name a base of another model_type than {GPT_OSS}"
        raise must("--base", rule, word, "train its jobs with tlora train")


_OF_JOB = "job:"
"""No declared name has a colon."""


def base_of_job(home: Home, job_id: str) -> str:
    """The name of a job's base: the one that was declared, or that of the job itself."""
    own = _weights(_section_of_job(home, job_id))
    declared = ((name, plain(base)) for name, base in read_bases(home).items())
    found = (name for name, section in declared if _weights(section) == own)
    return next(found, _OF_JOB + job_id)


def template_of_job(home: Home, job_id: str) -> str | None:
    """The chat template that a job's data were written by; None: its base's."""
    found = read_json(home.job(job_id) / JOB_NAME)
    return None if found is None else found.get("chat_template")


def base_section(home: Home, name: str) -> Mapping[str, Any]:
    """The section `base_model` of a base; raises `KeyError` if nobody has declared it."""
    if name.startswith(_OF_JOB):
        return _section_of_job(home, name.removeprefix(_OF_JOB))
    section: dict[str, Any] = plain(read_bases(home)[name])
    return section


def _weights(section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say which weights these are, in whatever dtype they are held."""
    return {key: value for key, value in section.items() if key not in ("dtype", "allow_change")}


def _section_of_job(home: Home, job_id: str) -> Mapping[str, Any]:
    found = read_json(home.job(job_id) / JOB_NAME)
    if found is None:
        raise KeyError(job_id)
    section: dict[str, Any] = found["base_model"]
    return section


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
    sampler_gb: float = 0.0
    """Memory of each GPU that a sampler has; gangs are planned without it."""
    data_root: str | None = None
    """Jobs may name files below this folder only, and through no link; None: any that can be read.
    """
    prepare_processes: int = 2
    """Processes at most that check and tokenize jobs, half a gigabyte of memory each."""
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
    keep_finished_s: float = math.inf
    """A job is removed so long after its end, its checkpoints after a quarter of that time."""
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
    """What takes long, such as decisions and removals, runs on threads of its own."""


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_age_s(text: str, what: str) -> float:
    """Seconds of an age such as 30d, 12h or 90m; raises `ConfigError` if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise must(what, "be an age such as 30d, 12h or 90m", text)
    return float(found[1]) * _UNITS_S[found[2]]


_DAYS = 30.0
_LEAST_DAYS = 1.0
"""Answers are kept for a day, whatever becomes of the session."""
_DAY_S = 86_400.0
KEEP_SESSIONS_S = _DAYS * _DAY_S
KINDS = ("own", "vllm", "sglang", "off")
SERVERS = ("vllm", "sglang")
MAY_DIFFER = "--sampler-may-differ"


def add_passed_on_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `tlora serve` is told for the process of HTTP that it starts."""
    parser.add_argument(
        "--keep-sessions",
        type=float,
        default=_DAYS,
        metavar="DAYS",
        help="keep sessions of Tinker's clients for so long after their end; checkpoints stay "
        f"(default: {_DAYS:g})",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests for this host name, as a proxy before the service passes it on; "
        "repeatable (default: this host's own names where the service listens for it alone, else "
        "any)",
    )
    parser.add_argument(
        "--sampler",
        choices=KINDS,
        default="own",
        help="what generates text over HTTP: own (a small exact generator), vllm, sglang, or off "
        "(default: own)",
    )
    parser.add_argument(
        "--sampler-gpu",
        metavar="N",
        help="number of the GPU that the sampler has to itself; leave it out of the service's "
        "(default: own samples on the CPU)",
    )
    parser.add_argument(
        "--sampler-memory",
        type=float,
        metavar="GB",
        help="let own share the GPU of --sampler-gpu with gangs: it takes at most so much of its "
        "memory, with a base of its own, and gangs are planned without (default: own takes half of "
        "what is free, and gangs know nothing of it)",
    )
    parser.add_argument(
        "--sampler-address",
        action="append",
        default=[],
        metavar="URL",
        help="server of vLLM or SGLang that runs already and serves each base under its name; its "
        "key is read from VLLM_API_KEY or SGLANG_API_KEY; repeatable (default: vllm serve is "
        "started for each base)",
    )
    parser.add_argument(
        "--sampler-words",
        metavar="WORDS",
        help="more words for vllm serve, such as '--tensor-parallel-size 2'; of servers at "
        "--sampler-address, the --max-loras and --max-lora-rank that they have",
    )
    parser.add_argument(
        MAY_DIFFER,
        action="store_true",
        help="sample also where the server at --sampler-address holds a base in another dtype or "
        "quantisation than it is trained in (default: that is refused)",
    )


def keep_sessions_s(args: argparse.Namespace) -> float:
    """Seconds for which sessions are kept; raises `ConfigError` if they are too few."""
    if not args.keep_sessions >= _LEAST_DAYS:
        raise must("--keep-sessions", f"be at least {_LEAST_DAYS:g} day", args.keep_sessions)
    return float(args.keep_sessions * _DAY_S)


def passed_on_words(args: argparse.Namespace) -> list[str]:
    """The same words again, for that process."""
    given = {"--sampler-gpu": args.sampler_gpu, "--sampler-words": args.sampler_words}
    given["--sampler-memory"] = args.sampler_memory
    # In one word: words begin with --, too.
    more = [f"{name}={value}" for name, value in given.items() if value is not None]
    more += [word for url in args.sampler_address for word in ("--sampler-address", url)]
    more += [word for name in args.allow_host for word in ("--allow-host", name)]
    if args.sampler_may_differ:
        more.append(MAY_DIFFER)
    return ["--keep-sessions", str(args.keep_sessions), "--sampler", args.sampler, *more]


def check_sampler(args: argparse.Namespace) -> None:
    """Refuses words about samplers that do not go together."""
    if args.sampler_address and args.sampler not in SERVERS:
        rule = f"be given with --sampler {' or '.join(SERVERS)}"
        raise must("--sampler-address", rule, args.sampler_address)
    if args.sampler == "sglang" and not args.sampler_address:
        raise must("--sampler sglang", "be given with --sampler-address", "none")
    if args.sampler_may_differ and not args.sampler_address:
        raise must(MAY_DIFFER, "be given with --sampler-address", True)
    if args.sampler_memory is not None:
        if args.sampler != "own" or args.sampler_gpu is None:
            rule = "be given with --sampler own and --sampler-gpu"
            raise must("--sampler-memory", rule, args.sampler_memory)
        if not args.sampler_memory > 0:
            raise must("--sampler-memory", "be above 0 GB", args.sampler_memory)


def open_sampler(
    args: argparse.Namespace, home: Home, say: Callable[[str], None] = lambda _: None
) -> Sampler | None:
    """The sampler that was chosen; nothing is started before somebody asks it. Close it at the end.

    Args:
        say: is told, on a thread, how like the bases that train a server's are.

    Raises:
        ConfigError: for words that do not go together.
    """
    check_sampler(args)
    if args.sampler == "off":
        return None
    folder, base_of = home.root / "sampler", partial(base_section, home)
    if args.sampler == "own":
        memory = args.sampler_memory
        limits = SamplerLimits(memory_bytes=None if memory is None else int(memory * 1e9))
        return OwnSampler(folder, base_of, OwnSettings(gpu=args.sampler_gpu, limits=limits))
    # Not at the top: our own sampler needs no httpx.
    from tlora_megatron.service.sampling.sglang_door import SglangDoor
    from tlora_megatron.service.sampling.vllm_door import Door
    from tlora_megatron.service.sampling.vllm_probe import ProbeSettings
    from tlora_megatron.service.sampling.vllm_sampler import VllmSampler
    from tlora_megatron.service.sampling.vllm_server import Server, VllmSettings

    key, probe = os.environ.get(f"{args.sampler.upper()}_API_KEY"), None
    settings = VllmSettings(gpu=args.sampler_gpu)
    if args.sampler_address:
        probe = ProbeSettings(home=home, may_differ=args.sampler_may_differ, say=say)
        settings = VllmSettings(most_rank=None)
    running = [Server(url.rstrip("/"), key) for url in args.sampler_address]
    settings = settings.with_words(args.sampler_words or "")
    door = SglangDoor if args.sampler == "sglang" else Door
    return VllmSampler(folder, base_of, settings, running, probe, door)
