"""Packed losses and adapter gradients of a model that a user built, beside their definition.

The definition is the same model untouched, in one process, every document alone: Megatron's own
attention, rotary embedding and positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tests.helpers.layout_sites import whole_tensors
from tests.helpers.tiny_models import random_factors
from tests.helpers.user_models import SPEC
from tlora_megatron.config.job import LoraSpec
from tlora_megatron.integrations.megatron.built.head import Targets, use_targets
from tlora_megatron.integrations.megatron.built.own_compute import OwnCompute
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import AdapterSlab
from tlora_megatron.layers.slab_layout import slab_layout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import (
    Document,
    join_nano_batches,
    pack_micro_batch,
    use_micro_batch,
)
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.parallel.nano_cuts import cut_by_length, fill_parts, padded_rows, shard_order

LORAS = (
    LoraSpec(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "o_proj", "linear_fc1")),
    LoraSpec(rank=3, alpha=3, target_modules=("linear_qkv", "gate_proj", "up_proj", "down_proj")),
)
MOE_LORAS = (
    LoraSpec(rank=4, alpha=8,
     target_modules=(*("q_proj", "o_proj", "shared_expert.up_proj"),
      *("experts.linear_fc1", "experts.linear_fc2"))),
    LoraSpec(rank=3, alpha=3, expert_rank=2, expert_sharing="outer",
     target_modules=(*("linear_qkv", "shared_expert.gate_proj", "shared_expert.down_proj"),
      *("experts.gate_proj", "experts.up_proj", "experts.down_proj"))),
)  # fmt: skip
PACKINGS = (
    ((0, 7), (0, 9), (1, 13), (1, 1)),
    ((0, 32),),
    ((1, 5), (1, 20)),
    ((0, 3), (1, 11), (1, 6)),
)
"""(slot, length) of the documents of each micro-batch of 32 tokens; the rest is padding."""
NUM_TOKENS = 32
NANO_MULTIPLE = 4
NANO_ROWS = 48
"""Rows of a micro-batch in nano-batches, each padded to a multiple of `NANO_MULTIPLE`."""


class Batch(NamedTuple):
    view: Any
    tokens: Tensor
    labels: Tensor
    weights: Tensor
    rows: Tensor
    """Packed row of every local row."""


def packed_batch(index: int, cp_rank: int = 0, cp_size: int = 1) -> Batch:
    documents = [Document(slot=slot, length=length) for slot, length in PACKINGS[index]]
    view = pack_micro_batch(
        documents, num_slots=len(LORAS), num_tokens=NUM_TOKENS, cp_rank=cp_rank, cp_size=cp_size
    )
    rows = view.local_rows()
    whole = whole_rows(index)
    return Batch(view, *(x[rows] for x in whole), rows)


def nano_batch(index: int, count: int, num_shards: int) -> Batch:
    """Micro-batch `index` in at most `count` nano-batches, its rows as they run; 48 of them."""
    documents = [Document(slot=slot, length=length) for slot, length in PACKINGS[index]]
    cuts = cut_by_length(documents, count)
    used = padded_rows(documents, cuts, NANO_MULTIPLE)
    sizes = fill_parts(used, num_rows=NANO_ROWS, multiple=NANO_MULTIPLE, most_rows=NUM_TOKENS)
    parts = [documents[begin:end] for begin, end in itertools.pairwise(cuts)]
    parts += [[]] * (len(sizes) - len(parts))
    views = [
        pack_micro_batch(part, num_slots=len(LORAS), num_tokens=size, token_budget=NUM_TOKENS)
        for part, size in zip(parts, sizes, strict=True)
    ]
    rows, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        length = sum(d.length for d in part)
        rows += [*range(begin, begin + length), *[NUM_TOKENS] * (size - length)]
        begin += length
    packed = torch.tensor(rows)[shard_order(sizes, num_shards)]
    whole = (torch.cat([x, x.new_zeros(1)]) for x in whole_rows(index))
    return Batch(join_nano_batches(views), *(x[packed] for x in whole), packed)


def whole_rows(index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and loss weights of a micro-batch in packed order; padding weighs nothing."""
    generator = torch.Generator().manual_seed(index)
    tokens, labels = torch.randint(SPEC.vocab_size, (2, NUM_TOKENS), generator=generator)
    weights = torch.rand(NUM_TOKENS, generator=generator)
    weights[sum(length for _, length in PACKINGS[index]) :] = 0
    return tokens, labels, weights


def fill_bank(bank: AdapterBank, spec: ModelSpec = SPEC, loras: Sequence[LoraSpec] = LORAS) -> None:
    adapters = []
    for seed, lora in enumerate(loras):
        slab = bank.new_slab(lora)
        slab.load(random_factors(spec, lora, seed=seed).__getitem__)
        adapters.append(Adapter(name=f"job{seed}", lora=lora, slab=slab))
    bank.install(adapters)


def run_packed(
    chunks: Sequence[Any],
    groups: ParallelGroups,
    num_nano: int = 1,
    *,
    compute: OwnCompute | None = None,
) -> list[Tensor]:
    """Losses of all rows in packed order, on the last stage; fills gradients.

    Args:
        compute: rows that weigh nothing have no loss, where the head can do without them.
    """
    layout = groups.layout
    own = range(len(PACKINGS))[groups.dp_rank :: layout.dp_size]
    batches = [packed_batch(i, groups.cp_rank, layout.cp_size) for i in own]
    if num_nano > 1:
        shards = layout.tp_size if layout.sequence_parallel else 1
        batches = [nano_batch(i, num_nano, shards) for i in own]

    head = compute and compute.head

    def step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        batch = next(iterator)
        output = output_of(model, batch, targets_alone=bool(head and head.runs))

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            losses = output.flatten()
            return (losses * batch.weights).sum(), torch.tensor(1), {"losses": losses.detach()}

        return output, loss

    if compute is not None:
        compute.parts.begin()
        compute.parts.end()
    outs = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks), num_microbatches=len(batches),
        seq_length=len(batches[0].rows) * layout.cp_size, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    found = [_all_rows(o["losses"], b.rows, groups) for o, b in zip(outs, batches, strict=False)]
    return _of_all_replicas(found, groups)


def output_of(model: Any, batch: Any, *, targets_alone: bool) -> Tensor:
    """Losses of a micro-batch's rows, by the model as it trains."""
    targets = Targets(batch.weights.nonzero().flatten(), batch.labels, scores=False)
    bound = use_targets(targets) if targets_alone else nullcontext()
    with use_micro_batch(batch.view), bound:
        return model(batch.tokens[None], None, None, labels=batch.labels[None])


def _of_all_replicas(found: list[Tensor], groups: ParallelGroups) -> list[Tensor]:
    """The losses of all micro-batches, which the replicas have dealt out."""
    if groups.layout.dp_size == 1 or not found:
        return found
    replicas: list[Any] = [None] * groups.layout.dp_size
    group = parallel_state.get_data_parallel_group()
    dist.all_gather_object(replicas, found, group=group)
    return [losses for dealt in zip(*replicas, strict=True) for losses in dealt]


def _all_rows(losses: Tensor, rows: Tensor, groups: ParallelGroups) -> Tensor:
    whole = torch.zeros(NUM_TOKENS + 1)  # the last one takes nano-batches' padding
    whole[rows] = losses
    whole = whole[:NUM_TOKENS]
    if groups.layout.cp_size > 1:
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def run_documents_alone(chunks: Sequence[Any]) -> list[Tensor]:
    """The same losses from the model as it was built, document by document, in one process."""
    (model,) = chunks
    losses = []
    for index, packing in enumerate(PACKINGS):
        tokens, labels, weights = whole_rows(index)
        parts, begin = [], 0
        for slot, length in packing:
            span = slice(begin, begin + length)
            view = pack_micro_batch(
                [Document(slot=slot, length=length)], num_slots=len(LORAS), num_tokens=length
            )
            parts.append(_alone(model, view, tokens[span], labels[span], weights[span]))
            begin += length
        losses.append(torch.cat([*parts, torch.zeros(NUM_TOKENS - begin)]))
    return losses


def _alone(model: Any, view: Any, tokens: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    length = len(tokens)
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    with use_micro_batch(view):
        out = model(tokens[None], torch.arange(length)[None], mask, labels=labels[None]).flatten()
    (out * weights).sum().backward()
    return out.detach()


def whole_gradients(
    bank: AdapterBank, groups: ParallelGroups, spec: ModelSpec = SPEC
) -> list[dict[str, Tensor]]:
    """Every adapter's whole gradient by canonical name, summed as the optimizer sums; on all ranks.

    Collective over the world.
    """
    layout, wholes = groups.layout, []
    for adapter in bank.adapters:
        slab, lora = adapter.slab, adapter.lora
        _sum_gradient(slab, groups)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, slab.grad.cpu())
        of_stage = len(everyone) // layout.pp_size
        holders = layout.expert_holders if lora.expert_targets else layout.tp_size
        held, layouts = [], []
        for pp, rank in itertools.product(range(layout.pp_size), range(holders)):
            held.append(everyone[pp * of_stage + rank])
            tp, place = rank % layout.tp_size, layout.expert_place(rank)
            sites = stage_sites(spec, layout, tp_rank=tp, pp_rank=pp, place=place)
            layouts.append(slab_layout(sites, lora))
        wholes.append(whole_tensors(layouts, held, spec))
    return wholes


def _sum_gradient(slab: AdapterSlab, groups: ParallelGroups) -> None:
    layout, begin = slab.layout, slab.layout.experts_begin
    parts = [
        (slab.grad[:begin], groups.dp_cp_group),
        (slab.grad[: layout.replicated_numel], groups.tp_group),
    ]
    if groups.experts is not None:
        replicated = slab.grad[begin : begin + layout.experts_replicated]
        parts += [
            (slab.grad[begin:], groups.experts.dp_group),
            (replicated, groups.experts.tp_group),
        ]
    for part, group in parts:
        if part.numel() and dist.get_world_size(group) > 1:
            dist.all_reduce(part, group=group)


def largest_error(
    got: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]
) -> tuple[float, str]:
    """Relative error in the Frobenius norm of the factor that is farthest off, and its name."""
    errors = []
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.keys() == theirs.keys(), f"{sorted(ours.keys() ^ theirs.keys())}"
        for name, tensor in theirs.items():
            assert tensor.norm() > 0, f"{name} must have a gradient to compare"
            errors.append((float((ours[name] - tensor).norm() / tensor.norm()), f"{index}:{name}"))
    return max(errors)
