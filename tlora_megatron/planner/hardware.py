"""What a GPU and its links can do: measured by `tlora profile`, or taken from a data sheet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from tlora_megatron.config.job import rule
from tlora_megatron.config.reader import ConfigError, must, read_spec
from tlora_megatron.config.shipped import shipped_folder
from tlora_megatron.config.source import read_document

logger = logging.getLogger(__name__)

_SUFFIXES = (".json", ".yaml", ".yml")

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "p2p"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmPoint:
    """Rate of `[rows, inner] x [inner, columns]`, and of the way back to the input."""

    rows: int = rule("rows of the micro-batch", ge=1)
    columns: int = rule("output features on one rank", ge=1)
    inner: int = rule("input features on one rank", ge=1)
    forward_flops_per_s: float = rule("of the product", gt=0)
    backward_flops_per_s: float = rule("of the input's gradient", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPoint:
    """Rate of causal attention in sequences of one length; only pairs that see each other count."""

    length: int = rule("tokens of a sequence", ge=1)
    forward_flops_per_s: float = rule("4 x head_dim operations a pair and head", gt=0)
    backward_flops_per_s: float = rule("10 x head_dim operations a pair and head", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraCost:
    """What all adapters of one linear add to its time: seconds for each count.

    T rows, K and N features in and out, r the rank of a row's adapter in 16s, p its targets on this
    linear, G fp32 elements of the gradients of all adapters that have rows.
    """

    forward_fixed_s: float = rule("a call", ge=0)
    forward_input_s: float = rule("an element of T K", ge=0)
    forward_rank_s: float = rule("an element of T N r", ge=0)
    forward_factor_s: float = rule("an element of G", ge=0)
    forward_dropout_s: float = rule("an element of T K with dropout", ge=0)
    backward_fixed_s: float = rule("a call", ge=0)
    backward_stream_s: float = rule("an element of T (2 N + K)", ge=0)
    backward_rank_s: float = rule("an element of T K r p", ge=0)
    backward_factor_s: float = rule("an element of G", ge=0)
    backward_dropout_s: float = rule("an element of T K with dropout", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Time the host needs to start work; a device that is faster than that waits."""

    layer_s: float = rule("forward and backward of one layer with adapters", ge=0)
    round_s: float = rule("packing a round and waiting for its end", ge=0)
    job_step_s: float = rule("one job's optimizer step", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A connection as a ring algorithm sees it."""

    bytes_per_s: float = rule("one direction, one GPU", gt=0)
    latency_s: float = rule("one message", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePoint:
    """A measured collective inside one node."""

    op: CollectiveOp = rule("p2p is a send to a neighbour")
    ranks: int = rule("GPUs that take part", ge=2)
    bytes: float = rule("of the whole tensor: gathered, or before it is scattered", gt=0)
    seconds: float = rule("until all have it", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """One kind of machine. Every number is what training sees, not a data sheet's peak."""

    name: str = rule("file name without its ending", nonempty=True)
    gpu: str = rule("as the driver calls it", nonempty=True)
    source: Literal["measured", "datasheet"] = rule("where the numbers come from")
    date: str = rule("day of the measurement or of the data sheet, YYYY-MM-DD", nonempty=True)
    versions: str = rule("torch, driver, kernels", default="")
    notes: str = rule("what was taken from where", default="")
    dtype: Literal["bfloat16", "float32"] = rule("of the measured operations", default="bfloat16")
    memory_bytes: float = rule("of one GPU", gt=0)
    reserved_bytes: float = rule("driver, libraries and buffers beside torch's tensors", ge=0)
    copy_bytes_per_s: float = rule("bytes read and written by a large copy", gt=0)
    stream_bytes_per_s: float = rule("the same for a layer's norms and activations", gt=0)
    gemms: tuple[GemmPoint, ...] = rule("rates by shape", nonempty=True)
    attention: tuple[AttentionPoint, ...] = rule("rates by length", nonempty=True)
    lora: LoraCost = rule("adapters' cost on a linear")
    host: HostCost = rule("time to start work")
    gpus_per_node: int = rule("GPUs that intra_node connects", ge=1)
    intra_node: Link = rule("between GPUs of a node")
    inter_node: Link | None = rule("between nodes; None = one node only", default=None)
    collectives: tuple[CollectivePoint, ...] = rule(
        "measured ones, taken before intra_node", default=()
    )
    stretch: float = rule(
        "time of a tensor-parallel collective between a layer's kernels over that of the same "
        "one after another",
        default=1.0,
        gt=0,
    )
    overlap: float = rule(
        "share of a collective that a GEMM beside it hides", default=0.0, ge=0, le=1
    )
    nano_overlap: float = rule(
        "share of a layer's tensor-parallel communication that nano-batches hide behind each "
        "other's compute, what the cut itself costs not counted (scripts/bench/overlap: a "
        "mechanism's step against that of `skipped`); 0 = not measured, nothing is counted on",
        default=0.0,
        ge=0,
        le=1,
    )


def load_profile(path: str | Path) -> HardwareProfile:
    """Reads a profile, YAML or JSON, strictly.

    Raises:
        ConfigError: if the file is missing or holds anything that is not a profile.
    """
    path = Path(path)
    document = read_document(path)
    try:
        profile = read_spec(HardwareProfile, document, "hardware")
    except ConfigError as error:
        raise ConfigError(f"{error} in {path}") from None
    try:
        date.fromisoformat(profile.date)
    except ValueError:
        raise must("hardware.date", "be a day, YYYY-MM-DD", profile.date) from None
    return profile


def profile_document(profile: HardwareProfile) -> dict[str, Any]:
    """Plain values that `load_profile` reads back to the same profile."""
    document = asdict(profile)
    for key in ("gemms", "attention", "collectives"):
        document[key] = list(document[key])
    return document


def shipped_profiles() -> Path:
    """Returns the folder of the hardware profiles that come with the project."""
    return shipped_folder("configs/hardware", "planner/profiles", "h200.json")


def find_profile(name: str, folders: Sequence[Path], option: str = "--hardware") -> HardwareProfile:
    """Finds a profile by path, or by name in the first folder that has it.

    Args:
        name: a path with a suffix, or the name of a file without one.
        folders: where to look for a name.
        option: the option or key with which the user gave the name.

    Raises:
        ConfigError: if there is no such profile; the message names those of all folders.
    """
    if Path(name).suffix:
        return load_profile(name)
    for folder in folders:
        for suffix in _SUFFIXES:
            if (folder / f"{name}{suffix}").is_file():
                return load_profile(folder / f"{name}{suffix}")
    known = sorted({path.stem for folder in folders for path, _ in profiles_in(folder)})
    raise must(option, f"be a file or one of {', '.join(known) or 'none'}", name)


def profiles_in(folder: Path) -> Iterator[tuple[Path, HardwareProfile]]:
    """The hardware profiles in a folder by file name; other files are passed over."""
    for path in sorted(folder.glob("*")):
        if path.suffix in _SUFFIXES and not path.stem.startswith("cluster-"):
            try:
                yield path, load_profile(path)
            except ConfigError as error:
                logger.info("%s is passed over: %s", path, error)
