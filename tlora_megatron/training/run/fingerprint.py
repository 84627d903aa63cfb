"""Holds the model of a run to its base's fingerprint before anything is trained.

The model scores the fingerprint's text through the run's own engine, layout and kernels, before
adapters are attached. Other weights, or the same ones with another rotary base, give other
log-probabilities.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from tlora_megatron.config.schema import RunConfig
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.evaluation import Scorer
from tlora_megatron.training.formats.fingerprint import FILE_NAME, Fingerprint, read_fingerprint
from tlora_megatron.training.packing.packing import Item, Placed, RoundShape
from tlora_megatron.training.packing.round_packer import RoundPacker

logger = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16", "fp8"]
"""Precision of the base's weights, as the run computes with them."""

_TIMES_BF16 = {"float32": 0.5, "bfloat16": 3.0, "fp8": 32.0}
"""Allowed error over that of the base in bfloat16, which its fingerprint holds. GPUs may compute
float32 in TF32, whose steps are an eighth of bfloat16's; those of FP8 weights are sixteen times
them. The rest is for sums in another order."""
_LEAST = {"float32": 1e-3, "bfloat16": 1e-2, "fp8": 1e-1}
_EXACT = 1e-4
"""Allowed error of float32 without TF32; other orders of sums stay a tenth below."""
_MOST = 0.5
"""A model that knows nothing of the text is off by 1.4."""


def allowed_error(fingerprint: Fingerprint, precision: Precision, device: torch.device) -> float:
    """Returns the largest `relative_error` of a model that is the base."""
    if precision == "float32" and device.type == "cpu":
        return _EXACT
    wanted = fingerprint.bf16_error * _TIMES_BF16[precision]
    return min(max(wanted, _LEAST[precision]), _MOST)


def relative_error(fingerprint: Fingerprint, log_probs: Sequence[float]) -> float:
    """Root mean square difference of a model's log-probabilities, over the fingerprint's spread.

    0 is the base and 1.4 a model that has nothing to do with it, whatever the vocabulary.

    Args:
        log_probs: of the fingerprint's second token and as many of the next as there are.
    """
    squares = [
        (found - expected) ** 2
        for found, expected in zip(log_probs, fingerprint.log_probs, strict=False)
    ]
    return math.sqrt(sum(squares) / len(squares)) / fingerprint.spread


def check_base(
    scorer: Scorer,
    groups: ParallelGroups,
    fingerprint: Fingerprint,
    *,
    where: str,
    precision: Precision,
    micro_batch_tokens: int,
    fills_budget: bool = False,
) -> float:
    """Refuses a model that does not reproduce its base's fingerprint; collective over the world.

    Call it before adapters are attached.

    Args:
        micro_batch_tokens: a shorter one than the text scores the text's beginning.

    Returns:
        The largest error of a data-parallel rank's model.

    Raises:
        ValueError: with both numbers, if the error is more than the precision explains.
    """
    budgets = groups.budgets(micro_batch_tokens)
    packer = RoundPacker(
        groups=groups,
        micro_batch_tokens=budgets[groups.dp_rank],
        shape=RoundShape(fills_budget=fills_budget),
        active=(True,),
    )
    tokens = np.array(fingerprint.tokens[: min(budgets) + 1], dtype=np.int64)
    sequence = TokenSequence(tokens, np.ones(len(tokens), dtype=bool))
    # One for every micro-batch of every data-parallel rank, so that no replica goes unseen.
    stages = groups.most_stages
    items = [Item(sequence, i, 0, 1.0) for i in range(groups.layout.dp_size * stages)]
    mine = items[groups.dp_rank * stages : (groups.dp_rank + 1) * stages]
    found = _score(scorer, packer, [(Placed(0, item),) for item in mine], items)
    errors = [relative_error(fingerprint, row) for row in found]
    error = max(errors, key=lambda e: e if math.isfinite(e) else math.inf)
    allowed = allowed_error(fingerprint, precision, groups.device)
    if not error <= allowed:
        raise ValueError(_sentence(fingerprint, found[errors.index(error)], error, allowed, where))
    logger.info(
        "the model is that of %s/%s: its log-probabilities differ by %.1e of their spread, "
        "at most %.1e in %s", where, FILE_NAME, error, allowed, precision,
    )  # fmt: skip
    return error


def check_base_of_run(
    scorer: Scorer, groups: ParallelGroups, config: RunConfig, *, in_fp8: bool = False
) -> None:
    """Checks a run that reads its base from a Hugging Face folder, if a fingerprint lies in it.

    Collective over the world; call it before adapters are attached.
    """
    base = config.base_model
    if base.path is None or base.random_init:
        return
    fingerprint = read_fingerprint(Path(base.path))
    if fingerprint is not None:
        check_base(
            scorer,
            groups,
            fingerprint,
            where=base.path,
            precision="fp8" if in_fp8 else base.dtype,
            micro_batch_tokens=config.run.micro_batch_tokens,
        )


def _sentence(
    fingerprint: Fingerprint, found: Sequence[float], error: float, allowed: float, where: str
) -> str:
    expected = fingerprint.log_probs[: len(found)]
    means = (-sum(values) / len(found) for values in (expected, found))
    return (
        "the model must give the text of {}/{} the loss {:.4f}, got {:.4f}: its log-probabilities "
        "differ by {:.2g} of their spread, where the precision explains {:.2g}. Its weights or the "
        "flags that enter the forward (rotary base, rope scaling, epsilon of the norms, ...) are "
        "another model's"
    ).format(where, FILE_NAME, *means, error, allowed)


def _score(
    scorer: Scorer, packer: RoundPacker, mine: Sequence[Sequence[Placed]], items: Sequence[Item]
) -> list[list[float]]:
    """Log-probabilities of every copy of the text.

    Args:
        mine: those of the copies that this replica scores, by micro-batch.
        items: all copies.
    """
    groups, micro_batches = packer.groups, packer.pack(mine)
    totals = torch.zeros(len(items), items[0].length, dtype=torch.float64)
    results = scorer.predict([batch.executed for batch in micro_batches])
    if groups.counts_losses:
        scored = zip(mine, micro_batches, results, strict=True)
        for placed, batch, (losses_T, _) in scored:
            row, values_T = 0, losses_T.double().cpu()
            for piece in batch.executed.view.pieces:
                if piece.index < len(placed):  # padding, the last piece, has no item
                    copy = placed[piece.index].item.index
                    places = slice(piece.offset, piece.offset + piece.length)
                    totals[copy, places] += values_T[row : row + piece.length]
                row += piece.length
    totals = totals.to(groups.device)
    dist.all_reduce(totals)
    return (-totals).tolist()
