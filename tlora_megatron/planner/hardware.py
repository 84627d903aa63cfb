"""Hardware profiles: the speed of a GPU and its links, measured or from a data sheet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Literal

from tlora_megatron.config.documents import read_file
from tlora_megatron.config.job import rule
from tlora_megatron.config.reader import ConfigError, must
from tlora_megatron.files import shipped_folder

logger = logging.getLogger(__name__)

_SUFFIXES = (".json", ".yaml", ".yml")

FP8_SPEEDUP = 1.75
"""Rate of a layer's linears in FP8 over bf16, both ways, quantisers counted: on an H200, by torch's
scaled products at 8,192 rows of Llama-3.1-8B's shapes."""

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "p2p"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmPoint:
    """Rate of a GEMM `[rows, inner] x [inner, columns]`, and of its input gradient."""

    rows: int = rule("rows of the micro-batch", ge=1)
    columns: int = rule("output features on one rank", ge=1)
    inner: int = rule("input features on one rank", ge=1)
    forward_flops_per_s: float = rule("rate of the product", gt=0)
    backward_flops_per_s: float = rule("rate of the input's gradient", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPoint:
    """Rate of causal attention by sequence length; only visible pairs are counted."""

    length: int = rule("tokens of a sequence", ge=1)
    forward_flops_per_s: float = rule("rate, at 4 x head_dim operations per pair and head", gt=0)
    backward_flops_per_s: float = rule("rate, at 10 x head_dim operations per pair and head", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraCost:
    """The time that all adapters of one linear add to it, in seconds per count.

    T is the number of rows, K and N the input and output features, r the rank of a row's adapter
    rounded up to 16s, p its targets on this linear, and G the fp32 elements of the gradients of all
    adapters that have rows.
    """

    forward_fixed_s: float = rule("per call", ge=0)
    forward_input_s: float = rule("per element of T K", ge=0)
    forward_rank_s: float = rule("per element of T N r", ge=0)
    forward_factor_s: float = rule("per element of G", ge=0)
    forward_dropout_s: float = rule("per element of T K with dropout", ge=0)
    backward_fixed_s: float = rule("per call", ge=0)
    backward_stream_s: float = rule("per element of T (2 N + K)", ge=0)
    backward_rank_s: float = rule("per element of T K r p", ge=0)
    backward_factor_s: float = rule("per element of G", ge=0)
    backward_dropout_s: float = rule("per element of T K with dropout", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Time that the host needs to launch work; a faster device waits for it."""

    layer_s: float = rule("time of one layer with adapters, forward and backward", ge=0)
    round_s: float = rule("time to pack a round and wait for its end", ge=0)
    job_step_s: float = rule("time of one job's optimizer step", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A connection between GPUs as a ring algorithm uses it."""

    bytes_per_s: float = rule("bandwidth in one direction of one GPU", gt=0)
    latency_s: float = rule("latency of one message", ge=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePoint:
    """A collective that was measured within one node."""

    op: CollectiveOp = rule("the collective; p2p: a send to a neighbour")
    ranks: int = rule("number of GPUs that take part", ge=2)
    bytes: float = rule("size of the whole tensor: gathered, or before it is scattered", gt=0)
    seconds: float = rule("time until all GPUs have the result", gt=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """The speed and memory of one kind of machine, as training sees them."""

    name: str = rule("file name without its suffix", nonempty=True)
    gpu: str = rule("name of the GPU as its driver gives it", nonempty=True)
    source: Literal["measured", "datasheet"] = rule("where the numbers come from")
    date: str = rule("day of the measurement or of the data sheet, YYYY-MM-DD", nonempty=True)
    versions: str = rule("versions of torch, driver and kernels", default="")
    notes: str = rule("where the numbers come from, in words", default="")
    dtype: Literal["bfloat16", "float32"] = rule(
        "dtype of the measured operations", default="bfloat16"
    )
    memory_bytes: float = rule("memory of one GPU", gt=0)
    reserved_bytes: float = rule(
        "memory of driver, libraries and buffers beside torch's tensors", ge=0
    )
    copy_bytes_per_s: float = rule("bytes that a large copy reads and writes per second", gt=0)
    stream_bytes_per_s: float = rule("the same rate for a layer's norms and activations", gt=0)
    gemms: tuple[GemmPoint, ...] = rule("GEMM rates by shape", nonempty=True)
    fp8_gemms: tuple[GemmPoint, ...] = rule(
        "the same of frozen FP8 linears, with the time in which activations and gradients are "
        "quantised; empty: not measured",
        default=(),
    )
    fp8_speedup: float | None = rule(
        "rate of an FP8 linear over that of `gemms`, where `fp8_gemms` is empty; null: the GPU has "
        "no FP8 products",
        default=FP8_SPEEDUP,
        gt=0,
    )
    attention: tuple[AttentionPoint, ...] = rule("attention rates by length", nonempty=True)
    lora: LoraCost = rule("time that adapters add to a linear")
    host: HostCost = rule("time that the host needs to launch work")
    gpus_per_node: int = rule("number of GPUs that intra_node connects", ge=1)
    gpus_per_host: int | None = rule(
        "GPUs of one operating system, where intra_node connects those of several (NVL72: 4); "
        "null: gpus_per_node",
        default=None,
        ge=1,
    )
    intra_node: Link = rule("link between GPUs of a node")
    inter_node: Link | None = rule(
        "link between nodes: one network card where nics_per_node is given, else one GPU's share; "
        "null: one node only",
        default=None,
    )
    nics_per_node: int | None = rule(
        "network cards of a node, near whose GPUs they are, one switch for each card's number "
        "(rail-optimised): a collective uses those of all its GPUs; null: never more than one "
        "GPU's share",
        default=None,
        ge=1,
    )
    collectives: tuple[CollectivePoint, ...] = rule(
        "measured collectives, which take precedence over intra_node", default=()
    )
    stretch: float = rule(
        "time of a tensor-parallel collective between a layer's kernels, over its time when the "
        "same collectives run back to back",
        default=1.0,
        gt=0,
    )
    overlap: float = rule(
        "share of a collective that a concurrent GEMM hides", default=0.0, ge=0, le=1
    )
    nano_overlap: float = rule(
        "share of a layer's tensor-parallel communication that nano-batches hide behind each "
        "other's compute, without the cost of splitting (scripts/bench/overlap: a "
        "mechanism's step against that of `skipped`); 0: not measured, none is assumed",
        default=0.0,
        ge=0,
        le=1,
    )

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def gpu_network_bytes_per_s(self) -> float:
        """Bandwidth to other nodes that a GPU has while all GPUs of its node send; 0 without."""
        if self.inter_node is None:
            return 0.0
        cards = 1.0 if self.nics_per_node is None else self.nics_per_node / self.gpus_per_node
        return self.inter_node.bytes_per_s * cards

    @property
    def host_gpus(self) -> int:
        """Number of GPUs for which one machine starts processes."""
        return self.gpus_per_host or self.gpus_per_node

    def of_nodes(self, gpus_per_node: int) -> HardwareProfile:
        """The same machines of which so many GPUs a node are used, each with its own cards."""
        cards = self.nics_per_node
        if cards is not None:
            cards = max(1, cards * gpus_per_node // self.gpus_per_node)
        host = min(self.host_gpus, gpus_per_node)
        return replace(
            self,
            gpus_per_node=gpus_per_node,
            gpus_per_host=host if self.gpus_per_host and gpus_per_node % host == 0 else None,
            nics_per_node=cards,
        )


def load_profile(path: str | Path) -> HardwareProfile:
    """Reads a profile from YAML or JSON; a `ConfigError` names what is unknown or missing."""
    path = Path(path)
    profile = read_file(HardwareProfile, path, "hardware", "hardware profile")
    try:
        date.fromisoformat(profile.date)
    except ValueError:
        raise must("hardware.date", "be a day, YYYY-MM-DD", profile.date) from None
    if profile.nics_per_node is not None and profile.inter_node is None:
        raise must(
            "hardware.nics_per_node",
            "be given with inter_node, the link of each card",
            profile.nics_per_node,
        )
    if profile.gpus_per_node % profile.host_gpus:
        raise must(
            "hardware.gpus_per_host",
            f"divide gpus_per_node = {profile.gpus_per_node}",
            profile.gpus_per_host,
        )
    return profile


def shipped_profiles() -> Path:
    """The folder of the hardware profiles that come with the project."""
    return shipped_folder("configs/hardware", "planner/profiles", "h200.json")


def find_profile(name: str, folders: Sequence[Path], option: str = "--hardware") -> HardwareProfile:
    """Finds a profile by path, or by name in the first folder that has it.

    Args:
        name: a path with a suffix, or the name of a file without one.
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
