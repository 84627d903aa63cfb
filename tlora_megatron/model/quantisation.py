"""Which linears of a frozen base are held in FP8, and what their codes come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tlora_megatron.config.base_model import EMBEDDING, HEAD, BaseModelSpec, is_unquantised
from tlora_megatron.model.spec import ModelSpec

PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linears of a layer, and the targets that each holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseQuantisation:
    """The quantisation of one base."""

    format: str
    """Describes it to people and to checkpoints, such as `e4m3, one scale an output channel`."""
    kind: Literal["channel", "block"]
    """What has a scale: an output channel, or a block of 128 x 128."""
    linears: frozenset[tuple[int, str]]
    """(layer, Megatron's name) of the linears that hold codes."""
    published: bool = False
    """The folder holds the codes; otherwise weights are quantised while they are read."""

    @property
    def layers_by_linear(self) -> tuple[tuple[str, int], ...]:
        """Megatron's names of the linears that hold codes, each with its number of layers."""
        counts = Counter(linear for _, linear in self.linears)
        return tuple((name, counts[name]) for name in PARTS if counts[name])

    def describe(self, spec: ModelSpec) -> str:
        """Returns one line for logs: the format, its origin, and what stays unquantised."""
        origin = "as published" if self.published else "quantised while it is read"
        total = spec.num_layers * len(PARTS)
        return f"fp8, {self.format}, {origin}; {len(self.linears)} of {total} linears"


def base_quantisation(base: BaseModelSpec, spec: ModelSpec) -> BaseQuantisation | None:
    """Returns how a configured base is quantised; None if it is not.

    Raises:
        ValueError: if the configuration names a layer that the model lacks.
    """
    if base.quantization is None:
        return None
    return quantised_on_reading(spec, base.unquantised)


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
