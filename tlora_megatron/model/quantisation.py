"""Which linears of a frozen base are held in FP8, and what their codes come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tlora_megatron.config.base_model import is_unquantised
from tlora_megatron.config.schema import EMBEDDING, HEAD, BaseModelSpec
from tlora_megatron.model.experts import refuse_experts
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.published_fp8 import BLOCK, PublishedFormat, read_published_format
from tlora_megatron.model.spec import ModelSpec

PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linears of a layer, and the targets that each holds."""


ADAPTER_METADATA = "tlora_base_quantization"
"""In the metadata of an adapter's safetensors: the base's quantisation, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseQuantisation:
    """The quantisation of one base."""

    format: str
    """Describes it to people and to checkpoints, such as `e4m3, one scale an output channel`."""
    kind: Literal["channel", "block"]
    """The part of a weight that has one scale: an output channel, or a block of 128 x 128."""
    linears: frozenset[tuple[int, str]]
    """(layer, Megatron's name) of the linears that hold codes."""
    published: PublishedFormat | None = None
    """The format of a folder that holds the codes; None = weights are quantised while read."""

    @property
    def layers_by_linear(self) -> tuple[tuple[str, int], ...]:
        """Megatron's names of the linears that hold codes, each with its number of layers."""
        counts = Counter(linear for _, linear in self.linears)
        return tuple((name, counts[name]) for name in PARTS if counts[name])

    def num_bytes(self, spec: ModelSpec) -> int:
        """Returns the bytes of all codes and scales of the model."""
        total = 0
        for _, linear in self.linears:
            rows, columns = spec.target_shape(linear)
            blocks = -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])
            total += rows * columns + 4 * (rows if self.kind == "channel" else blocks)
        return total

    def describe(self, spec: ModelSpec) -> str:
        """Returns one line for people: the format, its origin, and how much of the base it is."""
        origin = "quantised while it is read" if self.published is None else "as published"
        total, gib = spec.num_layers * len(PARTS), self.num_bytes(spec) / 2**30
        return (
            f"fp8, {self.format}, {origin}; {len(self.linears)} of {total} linears, {gib:.2f} GiB"
        )


def base_quantisation(base: BaseModelSpec, spec: ModelSpec) -> BaseQuantisation | None:
    """Returns how a configured base is quantised; None if it is not.

    Raises:
        ValueError: if its folder is quantised in a way that is not supported, or the configuration
            names a layer that the model lacks.
    """
    config = Path(base.path) / "config.json" if base.path is not None else None
    published = None if config is None else read_published_format(config)
    if published is not None or base.quantization:
        refuse_experts(spec.experts, "a base in FP8")
    if published is None:
        return quantised_on_reading(spec, base.unquantised) if base.quantization else None
    if set(base.unquantised) != {EMBEDDING, HEAD}:
        raise ValueError(
            f"base_model.unquantised must be left out over a folder that is published in FP8, "
            f"whose config.json says what stays unquantised, got {list(base.unquantised)}"
        )
    return quantised_as_published(spec, published)


def quantised_as_published(spec: ModelSpec, published: PublishedFormat) -> BaseQuantisation:
    """Returns the quantisation of a folder that holds codes.

    Raises:
        ValueError: if only a part of one of Megatron's linears has codes.
    """
    linears = set()
    for layer in range(spec.num_layers):
        for linear, targets in PARTS.items():
            quantised = [published.quantises(spec.module_path(layer, t)) for t in targets]
            if any(quantised) and not all(quantised):
                raise ValueError(
                    f"quantization_config must treat {', '.join(targets)} of layer {layer} alike, "
                    f"which are one GEMM here, got {quantised}"
                )
            if all(quantised):
                linears.add((layer, linear))
    per = {
        "channel": "one scale an output channel",
        "tensor": "one scale a tensor",
        "block": "one scale a block of 128 x 128",
    }[published.strategy]
    return BaseQuantisation(
        format=f"e4m3, {per} ({published.method})",
        kind="block" if published.strategy == "block" else "channel",
        linears=frozenset(linears),
        published=published,
    )


def check_block_layout(
    spec: ModelSpec, quantisation: BaseQuantisation, layout: ParallelLayout
) -> None:
    """Refuses a layout, or a model, that would cut blocks of 128 x 128.

    Raises:
        ValueError: naming the size, and the tensor-parallel sizes that fit.
    """
    if quantisation.kind != "block":
        return
    names = {linear for _, linear in quantisation.linears}
    cut = cut_block(spec, names, layout.tp_size)
    if cut is None:
        return
    fits = [n for n in range(1, spec.num_kv_heads + 1) if _divides(spec, n)]
    fits = [n for n in fits if cut_block(spec, names, n) is None]
    remedy = f"parallel.tp_size may be {', '.join(map(str, fits))}" if fits else "no tp_size fits"
    raise ValueError(
        f"{cut[0]} must be a multiple of {BLOCK[0]} with scales of blocks, got {cut[1]} with "
        f"parallel.tp_size {layout.tp_size}; {remedy}"
    )


def _divides(spec: ModelSpec, tp_size: int) -> bool:
    return not any(size % tp_size for size in (spec.num_heads, spec.num_kv_heads, spec.ffn_size))


def cut_block(spec: ModelSpec, linears: Collection[str], tp_size: int) -> tuple[str, int] | None:
    """Names a size at which a rank's part, or a part of a fused linear, would cut a block."""
    sizes = []
    if "linear_qkv" in linears:
        sizes.append(("head_dim", spec.head_dim))  # a key's rows lie behind its group's queries
    if "linear_proj" in linears and tp_size > 1:
        sizes.append(("num_heads * head_dim / tp_size", spec.q_size // tp_size))
    if "linear_fc1" in linears or ("linear_fc2" in linears and tp_size > 1):
        sizes.append(("intermediate_size / tp_size", spec.ffn_size // tp_size))
    return next(((name, size) for name, size in sizes if size % BLOCK[0]), None)


def quantised_on_reading(spec: ModelSpec, unquantised: Sequence[str]) -> BaseQuantisation:
    """Returns the quantisation of a base in a wider dtype.

    Args:
        unquantised: as `base_model.unquantised` holds it.

    Raises:
        ValueError: if it names a layer that the model lacks.
    """
    _check_layers(spec, unquantised)
    return BaseQuantisation(
        format="e4m3, one scale an output channel",
        kind="channel",
        linears=frozenset(
            (layer, linear)
            for layer in range(spec.num_layers)
            for linear, targets in PARTS.items()
            if not is_unquantised(unquantised, layer, targets[0])
        ),
    )


def _check_layers(spec: ModelSpec, names: Iterable[str]) -> None:
    for name in names:
        number = name.removeprefix("layers.").split(".")[0]
        if name not in (EMBEDDING, HEAD) and number.isdigit() and int(number) >= spec.num_layers:
            raise ValueError(
                f"base_model.unquantised must name layers 0 to {spec.num_layers - 1}, got {name}"
            )
