"""Checks block-diagonal adapters: which ranks and numbers of blocks go together."""

from __future__ import annotations

from collections.abc import Iterable

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.config.reader import ConfigError

_FUSED = {"linear_qkv": "q_proj, k_proj and v_proj", "linear_fc1": "gate_proj and up_proj"}
"""Fused targets and the single modules to name instead; a block belongs to one module."""


def check_blocks(lora: LoraSpec, path: str) -> None:
    """Refuses a parametrisation that contradicts itself, for any model.

    Args:
        lora: the adapter's settings.
        path: place of these settings in the configuration, such as `jobs[0].lora`.

    Raises:
        ConfigError: naming the field and the nearest valid values.
    """
    blocks, rank = lora.num_blocks, lora.rank
    if not lora.is_block_diagonal:
        if blocks != 1:
            raise ConfigError(
                f"{path}.num_blocks must be 1 with parametrization standard, got {blocks}; set "
                f"parametrization: block_diagonal"
            )
        return
    if blocks < 2:
        raise ConfigError(
            f"{path}.num_blocks must be at least 2 with parametrization block_diagonal, got "
            f"{blocks}; give the tp_size that the adapter is to be trained and served with"
        )
    if rank % blocks:
        ranks = either_of(r for r in (rank // blocks * blocks, -(-rank // blocks) * blocks) if r)
        divisors = either_of(
            nearest_options(blocks, (n for n in range(2, rank + 1) if rank % n == 0))
        )
        others = f", or num_blocks {divisors}" if divisors else ""
        raise ConfigError(
            f"{path}.rank must be a multiple of num_blocks = {blocks}, got {rank}; the nearest "
            f"are {ranks}{others}"
        )
    for target in lora.target_modules:
        if target in _FUSED:
            raise ConfigError(
                f"{path}.target_modules must name single modules with parametrization "
                f"block_diagonal, got {target}; name {_FUSED[target]}"
            )


def nearest_options(value: int, options: Iterable[int]) -> list[int]:
    """The nearest option below `value` and the nearest above it, where they exist."""
    options = list(options)
    below = [n for n in options if n < value][-1:]
    return below + [n for n in options if n > value][:1]


def either_of(numbers: Iterable[int]) -> str:
    """The numbers as text: `4 or 8`."""
    return " or ".join(str(n) for n in dict.fromkeys(numbers))
