"""Rows of a wide weight as FP8 codes and scales of a rank, and how far those are from the rows.

A scale is that of a whole row of the stored tensor, whatever columns the rank keeps: codes do not
depend on tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tlora_megatron.ops.quantised.rows import decode_rows, encode_rows
from tlora_megatron.training.formats.hf_checkpoint import WeightSource
from tlora_megatron.training.formats.rank_tensors import RankTensor


class CodePlaces(NamedTuple):
    """Places of some rows in a rank's tensors."""

    codes: Tensor
    """uint8 `[units, rows, columns]`."""
    scales: Tensor
    """fp32 `[units, rows]`."""

    def put(self, rows_URK: Tensor, cols: slice | None) -> Tensor:
        """Quantises whole rows into their places; returns `[2]`: sums of squares of D - W, of W."""
        wide_TK = rows_URK.flatten(0, 1).float()
        quantised = encode_rows(wide_TK)
        codes = quantised.codes_TK.view(rows_URK.shape)
        self.codes.copy_(codes if cols is None else codes[..., cols])
        self.scales.copy_(quantised.scales.view(rows_URK.shape[:2]))
        errors_TK = decode_rows(quantised, torch.float32).sub_(wide_TK)
        return torch.stack([_squares(errors_TK), _squares(wide_TK)])


def _squares(values_TK: Tensor) -> Tensor:
    # No dot: cuBLAS takes 32 MiB of a Hopper GPU for each stream that calls it, and keeps them.
    return torch.linalg.vector_norm(values_TK, dim=1).double().square().sum()


@dataclass(slots=True)
class Rounding:
    """Sums of squares of D - W and of W over the codes of each linear."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, squares: Tensor) -> None:
        """Adds what `CodePlaces.put` returned for some rows of a weight."""
        held = self.sums.get(name)
        self.sums[name] = squares if held is None else held + squares

    def join(self, others: Iterable[Rounding]) -> Rounding:
        """Adds the sums of others, whose streams have ended."""
        for other in others:
            for name, squares in other.sums.items():
                self.add(name, squares)
        return self

    def relative(self) -> dict[str, float]:
        """Returns |D - W| / |W| of every weight, of the rows that this rank has read."""
        sums = {name: value.tolist() for name, value in self.sums.items()}
        return {name: math.sqrt(error / max(of, 1e-30)) for name, (error, of) in sums.items()}


def assemble_codes(
    tensor: RankTensor, source: WeightSource, codes: Tensor, scales: Tensor
) -> Tensor:
    """Quantises a rank's tensor into its places; returns the sum of what `put` returns."""
    sums = []
    for piece in tensor.pieces:
        window = slice(piece.begin, piece.begin + piece.width)
        places = CodePlaces(tensor.units_of(codes)[:, window], tensor.units_of(scales)[:, window])
        rows = source.read(piece.source, piece.rows)
        sums.append(places.put(rows.view(*places.scales.shape, -1), piece.cols))
    return torch.stack(sums).sum(0)
