"""`train_worker.py` in fp64; see `wide_floats`."""

from __future__ import annotations

import tlora_megatron.integrations.megatron.engine  # noqa: F401  with fp32 constants of its own
from tests.helpers.train_worker import main
from tests.helpers.wide_floats import wide_floats

if __name__ == "__main__":
    with wide_floats():
        main()
