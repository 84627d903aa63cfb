"""Worker: scripts/bench/te_adapters.py on the CPU, Transformer Engine being its stand-in.

Arguments: those of the script.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from tests.helpers import te_stand_in
from tests.helpers.bench_modules import bench_modules
from tlora_megatron.integrations.megatron.layer.norm import RMSNorm


def stand_in_layer() -> tuple[Any, Any]:
    """As `te_models.te_layer`."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    te_stand_in.use_in(layer)
    return layer, RMSNorm


def main() -> int:
    """Returns the script's exit status."""
    with bench_modules() as bench:
        models, script = bench.load("te_models"), bench.load("te_adapters")
        models.te_layer = stand_in_layer
        for name, mode in models.MODES.items():  # Transformer Engine's kernel
            models.MODES[name] = mode._replace(fused_rope=False)
        status: int = script.main(sys.argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
