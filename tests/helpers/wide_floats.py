"""Has a process compute in fp64 wherever the package, or a library, says fp32.

Rounding to FP8 is not continuous: two fp32 runs whose sums are ordered differently soon round some
value another way, and drift apart. In fp64 they do not for as long as a test lasts, so that two
implementations can be held to many digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from tlora_megatron.training.run import training_run


@contextmanager
def wide_floats() -> Iterator[None]:
    """Makes fp64 of fp32; modules whose constants are to stay as they are must be imported before.

    Safetensors cannot be read as fp32 meanwhile.
    """
    wide = torch.float64
    default = torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        with (
            mock.patch.multiple(torch, float32=wide, float=wide),
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
            mock.patch.object(np, "float32", np.float64),
            mock.patch.dict(training_run.DTYPES, float32=wide),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
