"""The columns of a fused linear's output that belong to one target."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputColumns:
    """Columns of a fused output `[T, groups * stride]` that one target writes.

    In every group of `stride` columns the target owns `begin:begin + width`. Its *compact* column j
    is column `j // width * stride + begin + j % width` of the output.
    """

    groups: int
    stride: int
    begin: int
    width: int

    @property
    def size(self) -> int:
        """Number of columns."""
        return self.groups * self.width

    @property
    def is_whole(self) -> bool:
        """True if these are all columns, in order."""
        return self.width == self.stride

    def view(self, y_TN: torch.Tensor) -> torch.Tensor:
        """A view `[T, groups, width]` of the target's columns."""
        grouped = y_TN.unflatten(1, (self.groups, self.stride))
        return grouped[:, :, self.begin : self.begin + self.width]

    def read(self, y_TN: torch.Tensor) -> torch.Tensor:
        """The target's columns as `[T, size]`, a copy only where they are scattered."""
        return self.view(y_TN).flatten(1)

    def add(self, y_TN: torch.Tensor, delta_TN: torch.Tensor) -> None:
        """Adds `[T, size]` to the target's columns, in place."""
        self.view(y_TN).add_(delta_TN.unflatten(1, (self.groups, self.width)))
