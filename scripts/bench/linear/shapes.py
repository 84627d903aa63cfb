"""The linears, micro-batches and adapters that the layer benchmark measures: pure values."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tlora_megatron.layers.sites import Site, make_site
from tlora_megatron.profiling.sizes import LLAMA_8B, LLAMA_70B, TINY

RANKS = (8, 16, 32, 64)
SCALINGS = (2.0, 1.0, 0.5, 4.0)
LONE_RANK = 16
LINEARS = {"qkv": "linear_qkv", "o": "linear_proj", "gate_up": "linear_fc1", "down": "linear_fc2"}

MODELS = {"8b": (LLAMA_8B, 1), "70b_tp4": (LLAMA_70B, 4), "tiny": (TINY.layer_spec, 1)}
"""A prefix of shape names: the model and the tensor-parallel size whose shard is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """One frozen linear as one tensor-parallel rank holds it."""

    name: str
    model: str
    """A key of `MODELS`."""
    linear: str
    """A key of `layers.sites.LINEAR_TARGETS`."""

    @property
    def site(self) -> Site:
        """The linear's targets and local sizes."""
        spec, tp_size = MODELS[self.model]
        return make_site(spec, 0, self.linear, 0, tp_size)


SHAPES = {
    f"{model}_{short}": LinearShape(name=f"{model}_{short}", model=model, linear=linear)
    for model in MODELS
    for short, linear in LINEARS.items()
}
MEASURED = tuple(name for name in SHAPES if not name.startswith("tiny"))
"""Shapes measured by default; the tiny ones are for tests on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterMix:
    """The adapters of a micro-batch, and how many rows each has."""

    ranks: tuple[int, ...]
    scalings: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """End row of every adapter's segment."""
        return tuple(itertools.accumulate(self.lengths))


def adapter_mix(tokens: int, adapters: int) -> AdapterMix:
    """Ranks 8, 16, 32, 64 in turn (a lone adapter: 16) over ragged segments."""
    cycled = tuple(RANKS[i % len(RANKS)] for i in range(adapters))
    return AdapterMix(
        ranks=cycled if adapters > 1 else (LONE_RANK,),
        scalings=tuple(SCALINGS[i % len(SCALINGS)] for i in range(adapters)),
        lengths=segment_lengths(tokens, adapters),
    )


def segment_lengths(tokens: int, adapters: int) -> tuple[int, ...]:
    """Log-normal lengths, about half to twice the mean, aligned to nothing, that sum to `tokens`.

    Raises:
        ValueError: if there are fewer tokens than adapters.
    """
    if tokens < adapters:
        raise ValueError(f"tokens must be at least one an adapter ({adapters}), got {tokens}")
    draw = random.Random(1000 * adapters + tokens)
    weights = [draw.lognormvariate(0.0, 0.5) for _ in range(adapters)]
    spare = tokens - adapters
    bounds = [round(spare * w / sum(weights)) for w in itertools.accumulate(weights)]
    return tuple(1 + e - b for b, e in itertools.pairwise((0, *bounds)))
