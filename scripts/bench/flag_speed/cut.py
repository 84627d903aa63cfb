"""Cuts a packed micro-batch into one for each job in it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F

from tlora_megatron.ops.routing import pack_micro_batch
from tlora_megatron.training.packing.packing import PackedBatch, round_up


def cut_by_job(batch: PackedBatch, *, multiple: int) -> list[PackedBatch]:
    """Returns each job's rows as a micro-batch of one adapter, in packed order.

    Args:
        multiple: divides the rows of each.
    """
    parts, begin = [], 0
    for slot, group in itertools.groupby(batch.view.documents, lambda document: document.slot):
        if slot == batch.view.num_slots:
            break  # padding
        documents = [replace(document, slot=0) for document in group]
        length = sum(document.length for document in documents)
        rows, size = slice(begin, begin + length), round_up(length, multiple)
        begin += length
        view = pack_micro_batch(
            documents, num_slots=1, num_tokens=size, dropout_keys=(), cp_rank=0, cp_size=1
        )
        tokens_T, labels_T, weights_T = (
            F.pad(values[rows], (0, size - length))
            for values in (batch.tokens[0], batch.labels[0], batch.weights)
        )
        parts.append(
            PackedBatch(
                view=view,
                tokens=tokens_T.unsqueeze(0),
                labels=labels_T.unsqueeze(0),
                weights=weights_T,
                target_rows=torch.nonzero(weights_T).flatten(),
            )
        )
    return parts
