"""Worker: under context parallelism a layer's halves compute to the bit what its modules do.

Two layers of `tlora train` with adapters, keys gathered from all ranks: once as they are, once with
normed heads and recompute.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.variants import end_world
from tests.unit.integrations.megatron.layer.test_frozen_sublayer import (
    ALL,
    LENGTHS,
    NORMED,
    SPEC,
    equal,
    use_modules,
)
from tlora_megatron.config.schema import Recompute
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch, use_micro_batch
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.synthetic_run import SyntheticRun


def main() -> None:
    layout = ParallelLayout(cp_size=2)
    check(SPEC, layout, "none")
    check(NORMED, layout, "full")
    end_world("all equal")


def check(spec: ModelSpec, layout: ParallelLayout, recompute: Recompute) -> None:
    run = SyntheticRun(spec, layout, dtype=torch.float32, recompute=recompute)
    lengths = LengthHistogram.single(8)
    loads = [
        JobLoad(name=f"job{rank}", rank=rank, batch_size=1, lengths=lengths, targets=ALL)
        for rank in (2, 4)
    ]
    model = run.super_model(loads, sum(LENGTHS))
    documents = [Document(slot=slot, length=n) for slot, n in enumerate(LENGTHS[:2])]
    view = pack_micro_batch(
        documents, num_slots=2, num_tokens=sum(LENGTHS), cp_rank=run.groups.cp_rank, cp_size=2
    )
    decoder: Any = run.engine.model.decoder
    assert all(layer.direct_sublayers for layer in decoder.layers)
    actual = results(model, decoder, view, spec)
    use_modules(decoder)
    assert not any(layer.direct_sublayers for layer in decoder.layers)
    assert equal(actual, results(model, decoder, view, spec)), (spec.model_type, recompute)


def results(model: Any, decoder: Any, view: MicroBatchView, spec: ModelSpec) -> list[torch.Tensor]:
    """Output with and without a graph, the input's gradient, those of all factors."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    hidden, dout = torch.randn(2, view.num_tokens, 1, spec.hidden_size, generator=draw)
    hidden.requires_grad_()
    for job in model.jobs:
        job.adapter.slab.zero_grad()
    with use_micro_batch(view):
        out = decoder(hidden_states=hidden, attention_mask=None)
        with torch.no_grad():
            again = decoder(hidden_states=hidden, attention_mask=None)
    out.backward(dout)
    assert hidden.grad is not None
    slabs = [g.clone() for job in model.jobs for g in job.adapter.slab.grad_views().values()]
    assert any(grad.any() for grad in slabs)
    return [out.detach(), again, hidden.grad, *slabs]


if __name__ == "__main__":
    main()
