"""FP8 with one scale for a whole tensor, as Transformer Engine's current scaling has it.

The scale follows from the largest magnitude, which is known only behind the last element. A kernel
that makes a tensor finds it on the way and leaves it on the tensor (`hand_rows`), so that the
linear reads the tensor once, to cast it, and not twice. A linear that finds nothing there has
Transformer Engine quantise; the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_megatron.ops.quantised.rows import hand_rows, take_handed

PARTS = 256
"""Places of one largest magnitude, so that thread blocks do not all wait for the same one."""
UNIT = 16
"""Divides the elements of a tensor that is cast, as FP8's GEMMs ask of rows: several are read and
written at once."""
_TENSORS = 256
"""Tensors whose places are set to zero together."""


class OneScale:
    """Stands for a linear that quantises what it reads with one scale for all of it."""


ONE_SCALE = OneScale()


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The largest magnitude of a tensor, in parts."""

    parts: Tensor
    """int32 `[PARTS]`: bits of non-negative fp32 values, of which the largest counts."""


_PLACES: dict[tuple[int, int], list[Tensor]] = {}
"""Device and stream -> parts that hold zero and have no tensor yet."""


def find_largest(x: Tensor) -> Tensor:
    """Returns the parts, all zero, into which the kernel that writes x puts its largest magnitude.

    They already hang on x: whoever launches that kernel next need do nothing more.
    """
    device = x.device.index or 0
    stream = torch._C._cuda_getCurrentRawStream(device) if x.is_cuda else 0
    places = _PLACES.setdefault((device, stream), [])
    if not places:
        zeros = torch.zeros(_TENSORS, PARTS, dtype=torch.int32, device=x.device)
        places.extend(zeros.unbind())
    parts = places.pop()
    hand_rows(x, Largest(parts))
    return parts


def take_largest(x: Tensor) -> Largest | None:
    """Takes the largest magnitude of x off it; None if none was found, or x has changed since."""
    handed = take_handed(x)
    return handed.rows if handed is not None and isinstance(handed.rows, Largest) else None
