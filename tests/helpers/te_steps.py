"""Micro-batches of a `te_models.Subject`, its steps over them, and the gradients they leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tests.helpers.te_models import LORAS, Subject
from tlora_megatron.integrations.megatron.built.head import Targets, use_targets
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import whole_tensors
from tlora_megatron.layers.slab.layout import slab_layout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.dropout import mix_ints
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch, use_micro_batch


class Batch(NamedTuple):
    """A micro-batch on the device; all rows of it."""

    view: MicroBatchView
    tokens: Tensor
    labels: Tensor
    weights: Tensor
    """Weight of each row's loss; 0 in padding."""


def make_batch(step: int, num_tokens: int, spec: ModelSpec, device: torch.device) -> Batch:
    """Documents of every job: a token is followed by what the job's own table says.

    About an eighth of the rows is padding. A job's loss is the mean over its tokens.
    """
    draw = torch.Generator().manual_seed(step)
    shares = ((0, 0.3), (0, 0.07), (1, 0.2), (2, 0.13), (2, 0.18))
    documents, tokens, labels, weights = [], [], [], []
    for slot, share in shares:
        length = int(share * num_tokens)
        total = sum(int(s * num_tokens) for other, s in shares if other == slot)
        table = torch.randperm(spec.vocab_size, generator=torch.Generator().manual_seed(slot))
        row = torch.randint(spec.vocab_size // 8, (length,), generator=draw)
        documents.append(Document(slot=slot, length=length))
        tokens.append(row)
        labels.append(table[row])
        weights.append(torch.full((length,), 1.0 / total))
    padding = num_tokens - sum(len(row) for row in tokens)
    zeros = torch.zeros(padding, dtype=torch.long)
    view = pack_micro_batch(
        documents,
        num_slots=len(LORAS),
        num_tokens=num_tokens,
        dropout_keys=[mix_ints(slot, step) for slot in range(len(LORAS))],
    )
    return Batch(
        view,
        torch.cat([*tokens, zeros]).to(device),
        torch.cat([*labels, zeros]).to(device),
        torch.cat([*weights, torch.zeros(padding)]).to(device),
    )


def run(subject: Subject, batches: Sequence[Batch], *, targets_alone: bool = False) -> list[Tensor]:
    """One forward and backward of all micro-batches; each job's loss, summed over them, on TP 0.

    Gradients are left in the slabs.

    Args:
        targets_alone: padding has no loss, where the head can do without it.
    """
    losses = [torch.zeros((), device=subject.groups.device) for _ in LORAS]

    def step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        targets = Targets(batch.weights.nonzero().flatten(), batch.labels, scores=False)
        bound = use_targets(targets) if targets_alone else nullcontext()
        with use_micro_batch(batch.view), bound:
            output = model(batch.tokens[None], None, None, labels=batch.labels[None])

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            weighted = output.flatten().float() * batch.weights
            ends = batch.view.rows.ends
            for slot in range(len(LORAS)):
                losses[slot] += weighted[(0, *ends)[slot] : ends[slot]].detach().sum()
            return weighted.sum(), torch.ones((), dtype=torch.int, device=output.device), {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[subject.model],
        num_microbatches=len(batches),
        seq_length=len(batches[0].tokens),
        micro_batch_size=1,
        forward_only=False,
    )
    return losses


def take_gradients(subject: Subject) -> list[dict[str, Tensor]]:
    """Every adapter's whole gradient by canonical name, fp32 on the CPU; the slabs' are zero then.

    Collective over the ranks, which are one tensor-parallel replica.
    """
    groups, wholes = subject.groups, []
    for adapter in subject.bank.adapters:
        slab = adapter.slab
        replicated = slab.grad[: slab.layout.replicated_numel]
        if replicated.numel():
            dist.all_reduce(replicated, group=groups.tp_group)
        held = [torch.empty_like(slab.grad) for _ in range(groups.layout.tp_size)]
        dist.all_gather(held, slab.grad, group=groups.tp_group)
        slab.grad.zero_()
        layouts = [
            slab_layout(
                stage_sites(subject.spec, groups.layout, tp_rank=tp_rank, pp_rank=0), adapter.lora
            )
            for tp_rank in range(groups.layout.tp_size)
        ]
        wholes.append(whole_tensors(layouts, held, subject.spec))
    return wholes
