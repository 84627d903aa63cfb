"""Finds out before a run whether a model that is not ours keeps packed documents apart, exactly.

Documents of one micro-batch take turns: the odd ones get other tokens while the losses of the even
ones are compared, then the reverse. Shapes stay, so a model that keeps documents apart gives the
same bits; what leaks moves some. Gradients of some documents' losses must be zero at the others'
rows: sums of products with zeros, which no kernel rounds.

Losses may move by rounding where routed experts get other numbers of rows, and where a model gives
other bits for the very same micro-batch (atomics, ZeRO-3's addresses): what has moved is run again,
in another order. The other tokens are one token again and again, all for the same experts: where
these take a limited number of rows, most of another document's are dropped.

Unseen stay paths that are closed by weights of zero, unless an adapter lies on that very linear,
and positions that do not restart at a document's begin.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tlora_megatron.ops.routing import MicroBatchView, current_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.packing.packing import Item, PackedBatch, Placed, pack, round_up

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""By dtype: relative, of losses. Rounding of another order of sums stays a tenth below."""

_LENGTHS = (100, 9, 13, 5, 8, 20)
"""Rows of the documents: borders in several places. The first is longer than chunks of 64, and
where it is changed it has filled its experts before another's turn comes."""
_ATTEMPTS = 3
NUM_ROWS = 160
"""Rows that hold all of them, a multiple of 32."""


class _Found(NamedTuple):
    """The largest values that any process has seen."""

    moved: float
    """Largest move of a loss as other documents' tokens change."""
    usual: float
    """The same as a `usual_difference`."""
    again: float
    """Largest move of a loss as the same micro-batch runs again."""
    foreign: float
    """Largest gradient at another document's rows, padding included."""
    own: float
    """Largest gradient at rows of the document itself."""

    def is_apart(self, rounding: float) -> bool:
        """True if losses have moved by rounding at most."""
        return (self.usual if rounding else self.moved) <= rounding


def check_isolation(
    run: Callable[[Sequence[PackedBatch]], list[Tensor]],
    embeddings: Sequence[nn.Module],
    groups: ParallelGroups,
    *,
    name: str,
    dtype: torch.dtype,
    has_experts: bool,
    vocab_size: int,
    num_rows: int = NUM_ROWS,
    longest: int = max(_LENGTHS),
) -> None:
    """Refuses a model in which a document's losses or gradients depend on another's tokens.

    Collective over the world, and all processes raise alike. Call it before adapters are attached.
    Four micro-batches run as in training, up to three times if losses move.

    Args:
        run: forward and backward of micro-batches as in training; returns weighted losses of this
            process's rows, nothing where it computes none (`training.super_model.Engine`).
        embeddings: of this process, whose outputs require grad; none on later pipeline stages.
        num_rows: of a micro-batch over its context-parallel ranks.
        longest: the most tokens of a document that the model takes.
    """
    probes = _probes(_documents(vocab_size, num_rows, longest), num_rows, groups)
    # Interleaved schedules take as many micro-batches as there are stages, or a multiple.
    count = round_up(len(probes), groups.most_stages)
    rounding = ROUNDING[dtype] if has_experts else 0.0
    losses: list[list[Tensor]] = [[] for _ in probes]
    for attempt in range(_ATTEMPTS):
        # In turn the changed ones run first: addresses may alternate as well.
        order = [(index % len(probes)) ^ (attempt % 2) for index in range(count)]
        with _row_gradients(embeddings) as heard:
            ran = run([probes[index] for index in order])
        for index, losses_T in zip(order, ran, strict=False):
            losses[index].append(losses_T[probes[index].target_rows])
        found = _seen(probes, losses, heard, groups)
        if found.is_apart(rounding):
            break
    if found.again > 0:
        rounding = ROUNDING[dtype]
    _refuse(found, rounding, f"the model {name} must keep the documents of a micro-batch apart")


def _refuse(found: _Found, rounding: float, rule: str) -> None:
    if not found.is_apart(rounding):
        raise ValueError(
            f"{rule}, got losses of one document that move by {found.moved:.1e} when another's "
            "tokens change (convolutions and states that run on from one document into the next "
            "do that): it is not supported"
        )
    if found.own == 0:
        raise ValueError(f"{rule}, got no gradient at its embedding, where that is seen")
    if found.foreign > 0:
        raise ValueError(
            f"{rule}, got gradients of one document's losses at another's tokens, "
            f"{found.foreign / found.own:.1e} of those at its own (convolutions and states that "
            "run on from one document into the next do that): it is not supported"
        )


def usual_difference(found_N: Tensor, expected_N: Tensor) -> float:
    """Returns how far the losses of most tokens are apart, relative to the size of all.

    Rounding gives single tokens other experts, and with them another loss; a model that packs
    wrongly moves more than half of them.
    """
    return float((found_N - expected_N).abs().median() / expected_N.square().mean().sqrt())


def _documents(vocab_size: int, num_rows: int, longest: int) -> list[np.ndarray]:
    """Random tokens of the documents, each one more than its rows."""
    lengths = [min(length, longest) for length in _LENGTHS]
    while sum(lengths) > num_rows:  # borders stay in several places, few of them at round numbers
        lengths = [max(1, length // 2) for length in lengths[:num_rows]]
    draws = np.random.default_rng(0)
    return [draws.integers(vocab_size, size=length + 1) for length in lengths]


def _probes(
    documents: Sequence[np.ndarray], num_rows: int, groups: ParallelGroups
) -> list[PackedBatch]:
    """Pairs of micro-batches: losses of the same documents, the others as drawn and changed."""
    probes = []
    for kept, changes in itertools.product((0, 1), (False, True)):
        placed = []
        for index, tokens in enumerate(documents):
            is_kept = index % 2 == kept
            if changes and not is_kept:
                tokens = np.full_like(tokens, documents[kept][0])
            sequence = TokenSequence(tokens, np.ones(len(tokens), dtype=bool))
            placed.append(Placed(0, Item(sequence, index, 0, float(is_kept))))
        packed = pack(
            placed,
            num_tokens=num_rows,
            num_slots=1,
            dropout_keys=(),
            cp_rank=groups.cp_rank,
            cp_size=groups.layout.cp_size,
            device=groups.device,
        )
        probes.append(packed)
    return probes


class _Heard(NamedTuple):
    """Gradients at the rows that an embedding has given."""

    view: MicroBatchView
    largest_n: Tensor
    """The largest of every row, absolute."""


@contextmanager
def _row_gradients(embeddings: Sequence[nn.Module]) -> Iterator[list[_Heard]]:
    """Yields a list that gets the gradients at every output of the embeddings."""
    heard: list[_Heard] = []

    def listen(module: nn.Module, args: Any, output: Tensor) -> None:
        view = current_micro_batch()
        assert view is not None, "micro-batches are bound around the model"

        def hear(gradient: Tensor) -> None:
            heard.append(_Heard(view, gradient.detach().abs().amax(dim=-1).flatten()))

        if output.requires_grad:
            output.register_hook(hear)

    hooks = [embedding.register_forward_hook(listen) for embedding in embeddings]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _seen(
    probes: Sequence[PackedBatch],
    losses: Sequence[Sequence[Tensor]],
    heard: Sequence[_Heard],
    groups: ParallelGroups,
) -> _Found:
    """Returns what the probes have shown to all processes; collective over the world.

    Args:
        losses: of the rows with a target, by probe, as often as it ran.
    """
    moved, usual, again, foreign, own = [0.0], [0.0], [0.0], [0.0], [0.0]
    for drawn, changed in zip(losses[::2], losses[1::2], strict=True):
        pairs = [(a, b) for a, b in itertools.product(drawn, changed) if len(a)]
        if pairs:
            moved.append(min(_or_infinity(_difference(*pair)) for pair in pairs))
            usual.append(min(_or_infinity(usual_difference(*pair)) for pair in pairs))
    for same in losses:
        again += [_difference(*pair) for pair in itertools.pairwise(same) if len(pair[0])]
    weights = {id(batch.view): batch.weights for batch in probes}
    for view, largest_n in heard:
        weights_n = weights[id(view)]
        if len(largest_n) < len(weights_n):  # sequence parallelism
            weights_n = weights_n.view(-1, len(largest_n))[groups.tp_rank]
        is_own_n = weights_n > 0
        foreign.append(float(largest_n.masked_fill(is_own_n, 0).max()))
        own.append(float(largest_n.masked_fill(~is_own_n, 0).max()))
    columns = (moved, usual, again, foreign, own)
    largest = [max(map(_or_infinity, values)) for values in columns]
    of_all = torch.tensor(largest, dtype=torch.float32, device=groups.device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
    return _Found(*of_all.tolist())


def _difference(found_N: Tensor, expected_N: Tensor) -> float:
    return float((found_N - expected_N).abs().max())


def _or_infinity(value: float) -> float:
    """What compares as NaN should: a reduction may lose NaN."""
    return math.inf if math.isnan(value) else value
