"""Describes a frozen base model to training, whoever built it: by its shape or its linears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora_megatron.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One linear that every layer of a backbone has."""

    target: str
    """Last part of its module name, such as `q_proj`."""
    path: str
    """Its full module name, with `{}` in the place of the layer number."""
    out_size: int
    in_size: int
    kind: Literal["column", "row"] = "column"
    """The dimension that tensor parallelism splits: outputs (column) or inputs (row)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearsSpec:
    """A decoder of equal layers, described by its plain linears."""

    num_layers: int
    vocab_size: int
    max_positions: int
    linears: tuple[LinearShape, ...]
    """Linears in the order of the layer's modules; no target occurs twice."""
    refused: tuple[tuple[str, str], ...] = ()
    """Last parts of module names that cannot be targets, each with the reason."""
    sliding_window: int | None = None
    """The same as `ModelSpec.sliding_window`."""

    def linear(self, target: str) -> LinearShape:
        """The linear that a target names.

        Raises:
            ValueError: if there is none; the message says why.
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
        """Module name of a target in the transformers model."""
        return self.linear(target).path.format(layer)

    @property
    def peft_targets(self) -> tuple[str, ...]:
        """Targets that PEFT can name in this model, in its order."""
        return tuple(linear.target for linear in self.linears)


Backbone = ModelSpec | LinearsSpec
"""Everything that training needs to know about the frozen base model."""
