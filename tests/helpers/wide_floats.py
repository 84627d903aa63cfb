"""Has a process compute in fp64 wherever the package, or a library, says fp32.

As a worker it is `train_worker.py` in fp64.

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
    torch.storage._dtype_to_storage_type_map()  # kept by torch: it must know the true types
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


if __name__ == "__main__":
    import tlora_megatron.integrations.megatron.engine  # noqa: F401  with fp32 constants of its own
    from tests.helpers.train_worker import main

    with wide_floats():
        main()
