"""Checks that a variant computes what the unsplit step does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scripts.bench.overlap.cases import FROZEN, NONE, Bench, Step
from tlora_megatron.parallel.tensor_collectives import TensorCollectives


class GradientCheck:
    """Holds one case's variants to the error that rounding alone makes in the unsplit step."""

    def __init__(
        self, bench: Bench, layers: int | None, make: Callable[[str], TensorCollectives]
    ) -> None:
        self._bench, self._layers, self._make = bench, layers, make
        self._errors: dict[bool, float] = {}
        """Error of the unsplit step's gradient against fp32, frozen or not."""
        self._exact_gradients: dict[bool, torch.Tensor] = {}

    def error(self, step: Step) -> float:
        """Relative distance of the input's gradient from fp32's, for a step that has run.

        The first step asked about, frozen or not, is the unsplit one.

        Raises:
            ArithmeticError: if it is half as far again as the unsplit step's.
        """
        frozen = step.variant.frozen
        expected = self._exact(frozen)
        actual = step.gradient().float()
        error = ((actual - expected).norm() / expected.norm()).item()
        allowed = max(1.5 * self._errors.setdefault(frozen, error), 1e-5)
        if not error <= allowed:
            raise ArithmeticError(
                f"the input's gradient is {error:.3g} off fp32's, of which rounding is "
                f"{self._errors[frozen]:.3g}"
            )
        return error

    def _exact(self, frozen: bool) -> torch.Tensor:
        if frozen not in self._exact_gradients:
            exact = self._bench.in_fp32(self._layers)
            for variant in (NONE, FROZEN):
                step = exact.step(variant, self._make)
                with step.installed():
                    step()
                self._exact_gradients[variant.frozen] = step.gradient().cpu()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return self._exact_gradients[frozen].to(self._bench.device)
