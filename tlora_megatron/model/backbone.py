"""What training asks of a frozen backbone, whoever built it: a `ModelSpec` or its linears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora_megatron.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One linear that every layer of a backbone has."""

    target: str
    """Last part of its module name."""
    path: str
    """Its module name, with `{}` for the number of the layer."""
    out_size: int
    in_size: int
    kind: Literal["column", "row"] = "column"
    """How tensor parallelism cuts it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearsSpec:
    """Any decoder of equal layers, by its plain linears: what training asks of a backbone."""

    num_layers: int
    vocab_size: int
    max_positions: int
    linears: tuple[LinearShape, ...]
    """In the order of the layer's modules, no target twice."""
    refused: tuple[tuple[str, str], ...] = ()
    """Module names' last parts that cannot be targets, with the reason."""
    sliding_window: int | None = None
    """As `ModelSpec.sliding_window`."""

    def linear(self, target: str) -> LinearShape:
        """The linear a target names.

        Raises:
            ValueError: if there is none, saying why.
        """
        for linear in self.linears:
            if linear.target == target:
                return linear
        names = ", ".join(self.peft_targets) or "none here"
        reason = dict(self.refused).get(target, "no linear of the backbone's layers has that name")
        raise ValueError(
            f"lora.target_modules must name linears that every layer has ({names}), "
            f"got {target!r}: {reason}"
        )

    def target_shape(self, target: str) -> tuple[int, int]:
        """`(out, in)` of a target's whole weight."""
        linear = self.linear(target)
        return linear.out_size, linear.in_size

    def module_path(self, layer: int, target: str) -> str:
        """Of a target in transformers' model."""
        return self.linear(target).path.format(layer)

    @property
    def peft_targets(self) -> tuple[str, ...]:
        """What PEFT can name in this model, in its order."""
        return tuple(linear.target for linear in self.linears)


Backbone = ModelSpec | LinearsSpec
"""What training needs to know of the frozen model."""
