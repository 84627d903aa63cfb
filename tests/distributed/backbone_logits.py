"""Worker: runs tiny backbones in every layout of its world size against stored references.

Arguments: folder of the models, names of the models, then each variant as in `tp=2,sp=1,pp=2,cp=1,
recompute=full`. A model's folder holds a `reference.pt`: micro-batches with Hugging Face's logits,
and gradients of the embedded tokens of `sum(logits * weights)`, each document run alone. Where a
folder has no safetensors, the weights are drawn by `RANDOM_SEED`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tests.helpers.variants import end_world, layout_of, options_of
from tlora_megatron.config.schema import Recompute
from tlora_megatron.integrations.megatron import engine as recompute
from tlora_megatron.integrations.megatron.model import build_backbone, load_backbone
from tlora_megatron.integrations.megatron.process_groups import initialize_parallel
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch, use_micro_batch

RANDOM_SEED = 7


class MicroBatch(NamedTuple):
    view: MicroBatchView
    ids: Tensor
    weights: Tensor
    logits: Tensor
    grads: Tensor


def main() -> None:
    root, models = Path(sys.argv[1]), sys.argv[2].split(",")
    for variant in sys.argv[3:]:
        options = options_of(variant)
        layout = layout_of(options)
        initialize_parallel(layout)
        recompute.install()
        for name in models:
            check_model(root / name, layout, options.get("recompute", "none"))
    end_world("all equal")


def check_model(directory: Path, layout: ParallelLayout, recompute: Recompute) -> None:
    spec = read_model_spec(directory / "config.json")
    model = build_backbone(spec, layout, dtype=torch.float32, recompute=recompute)
    source = directory if any(directory.glob("*.safetensors")) else None
    load_backbone(model, spec, source, layout, seed=RANDOM_SEED)
    device = next(model.parameters()).device
    stored = torch.load(directory / "reference.pt", weights_only=True, map_location=device)
    batches = [local_part(micro_batch, spec, layout) for micro_batch in stored]
    logits, grads = run(model, batches, spec)
    name = f"{directory.name} in {layout}, recompute {recompute}"
    for batch, value in zip(batches, logits, strict=True):
        assert_close(f"logits of {name}", value, batch.logits, 1e-5)
    for batch, value in zip(batches, grads, strict=True):
        assert_close(f"gradients of {name}", value, batch.grads, 1e-4)


def assert_close(name: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape, f"{name}: {got.shape} != {expected.shape}"
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    assert error < tolerance, f"{name}: relative error {error}"


def local_part(stored: dict[str, Any], spec: ModelSpec, layout: ParallelLayout) -> MicroBatch:
    """This rank's rows of a micro-batch: all its CP rows; for gradients, its SP rows of those."""
    cp_rank = parallel_state.get_context_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    view = pack_micro_batch(
        [Document(slot=0, length=length) for length in stored["lengths"]], num_slots=1,
        num_tokens=len(stored["ids"]), cp_rank=cp_rank, cp_size=layout.cp_size,
    )  # fmt: skip
    rows = view.local_rows().to(stored["ids"].device)
    columns = -(-spec.vocab_size // layout.tp_size)
    shard = slice(tp_rank * columns, min((tp_rank + 1) * columns, spec.vocab_size))
    grad_rows = rows
    if layout.sequence_parallel:
        grad_rows = rows.view(layout.tp_size, -1)[tp_rank]
    return MicroBatch(
        view=view, ids=stored["ids"][rows][None], weights=stored["weights"][rows][:, shard],
        logits=stored["logits"][rows][:, shard], grads=stored["grads"][grad_rows],
    )  # fmt: skip


def run(
    model: GPTModel, batches: list[MicroBatch], spec: ModelSpec
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits (on the last stage) and embedding gradients (on the first) of every micro-batch."""
    logits: list[Tensor] = []
    grads: dict[int, Tensor] = {}

    def forward_step(batches: Iterator[MicroBatch], model: GPTModel) -> tuple[Tensor, Any]:
        batch = next(batches)
        with use_micro_batch(batch.view):
            output = model(batch.ids, None, None)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            valid = batch.weights.shape[1]
            logits.append(output[0, :, :valid].detach().clone())
            total = (output[0, :, :valid] * batch.weights).sum()
            return total, torch.tensor(1), {}

        return output, loss

    if model.pre_process:
        order = iter(range(len(batches)))

        def keep_grad(module: Any, args: Any, output: Tensor) -> None:
            assert output.requires_grad
            index = next(order)
            output.register_hook(lambda grad: grads.__setitem__(index, grad[:, 0]))

        model.embedding.register_forward_hook(keep_grad)
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].ids.shape[1] * model.config.context_parallel_size, micro_batch_size=1,
        forward_only=False,
    )  # fmt: skip
    if not model.post_process:
        assert not logits, "only the last stage has logits"
    assert sorted(grads) == (list(range(len(batches))) if model.pre_process else [])
    return (
        logits or [batch.logits for batch in batches],
        [grads.get(i, batch.grads) for i, batch in enumerate(batches)],
    )


if __name__ == "__main__":
    main()
