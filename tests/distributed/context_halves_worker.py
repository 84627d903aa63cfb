"""Worker: under context parallelism a layer's halves compute to the bit what its modules do.

Two layers of `tlora train` with adapters, keys gathered from all ranks: once as they are, once with
normed heads and recompute.
"""

from __future__ import annotations

from tests.helpers.variants import end_world
from tests.unit.integrations.megatron.layer.test_frozen_sublayer import (
    NORMED,
    SPEC,
    Case,
    equal,
    use_modules,
    whole,
)
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.spec import ModelSpec


def main() -> None:
    check(SPEC, "none")
    check(NORMED, "full")
    end_world("all equal")


def check(spec: ModelSpec, recompute: Recompute) -> None:
    case = Case(recompute, spec=spec, cp_size=2)
    view = whole(cp_rank=case.run.groups.cp_rank, cp_size=2)
    assert all(layer.direct_sublayers for layer in case.decoder.layers)
    actual = case.results(view)
    assert any(grad.any() for grad in case.slabs)
    use_modules(case.decoder)
    assert not any(layer.direct_sublayers for layer in case.decoder.layers)
    assert equal(actual, case.results(view)), (spec.model_type, recompute)


if __name__ == "__main__":
    main()
