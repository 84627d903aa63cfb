"""A job of pairs while it trains: its reference, its batches, and what is reported of them.

The reference is the job as it starts: evaluations score its pairs once before the first step. Two
numbers a pair are kept in `jobs/NAME/reference.safetensors` with the first checkpoint, by which
whoever goes on from there finds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from tlora_megatron.config.job import JobSpec, PreferenceSpec
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.ops.frozen.losses import segment_sums
from tlora_megatron.ops.frozen.pair_losses import PAIR_KINDS, PairTerms, pair_losses
from tlora_megatron.ops.host_copy import to_device
from tlora_megatron.training.data.job_data import BatchPlan, JobData
from tlora_megatron.training.data.tokenize import TokenSequence, fingerprint
from tlora_megatron.training.packing.packing import Item, Rejected, batch_items, terms_of

REFERENCE_FILE = "reference.safetensors"
SCORES = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
"""Means over pairs, by TRL's names."""
Scores = Mapping[str, float]


class Reference(NamedTuple):
    """Log-probabilities of both sides of all pairs, fp32 `[pairs, 2]`; NaN = no step takes it."""

    train: np.ndarray
    eval: np.ndarray
    eval_data: np.ndarray
    """Fingerprint of the evaluation's sequences; checkpoints have that of the others."""

    @classmethod
    def of(
        cls, data: JobData, pairs: Sequence[int] = (), logps: Sequence[float] | None = None
    ) -> Reference:
        """The reference from what an evaluation of some pairs, and of `data.eval`, has found.

        Args:
            logps: None = the loss has no reference, so all are 0.
        """
        train_P2, eval_P2 = (
            np.zeros((len(part) // 2, 2), np.float32) for part in (data.train, data.eval)
        )
        if logps is not None:
            found_P2 = np.array(logps, np.float32).reshape(-1, 2)
            train_P2[:] = np.nan
            train_P2[list(pairs)], eval_P2[:] = np.split(found_P2, [len(pairs)])
        return cls(train_P2, eval_P2, np.frombuffer(fingerprint(data.eval).encode(), np.uint8))

    @classmethod
    def read(cls, folder: Path, job: JobSpec, data: JobData, plan: BatchPlan) -> Reference:
        """Reads the one that a job's folder holds.

        Raises:
            ValueError: if it is missing or damaged, or of other pairs than the job takes.
        """
        path = folder / REFERENCE_FILE
        where = f"job {job.name!r}: {path} must hold the log-probabilities of the job's start"
        try:
            found = cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise ValueError(f"{where}, got: {error}") from error
        is_same = found.eval_data.tobytes().decode() == fingerprint(data.eval)
        if not is_same or np.isnan(found.train[drawn_pairs(plan)]).any():
            raise ValueError(
                f"{where} for all pairs of its steps and of data.eval, got others; give max_steps, "
                "epochs and data.eval as before"
            )
        return found

    def write(self, folder: Path) -> None:
        """Writes it into a job's folder, whole or not at all, unless it is there."""
        path, content = folder / REFERENCE_FILE, save(self._asdict())
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content, mode=BY_UMASK)


def drawn_pairs(plan: BatchPlan) -> list[int]:
    """The pairs that a job's steps take, in ascending order."""
    if plan.num_epochs >= 1:
        return list(range(plan.num_sequences))
    return sorted(set(itertools.chain(*map(plan.indices, range(plan.num_steps)))))


def sides_of(sequences: Sequence[TokenSequence], pairs: Sequence[int]) -> list[TokenSequence]:
    """The chosen and the rejected side of each of the pairs."""
    return [sequences[2 * pair + side] for pair in pairs for side in (0, 1)]


def pair_items(
    sides: Sequence[TokenSequence], spec: PreferenceSpec, reference_P2: np.ndarray
) -> list[Item]:
    """A batch of pairs, weighted so that their losses add up to the batch's.

    Args:
        sides: of each pair the chosen and the rejected one.
    """
    targets = [int(side.is_target.sum()) for side in sides]
    default = 1.0 if spec.loss == "orpo" else 0.0
    sft = (default if spec.sft_weight is None else spec.sft_weight) / sum(targets[::2])
    weight, items = 2 / len(sides), []
    for index, item in enumerate(batch_items(sides)):
        if index % 2 == 0:
            terms = PairTerms(
                kind=PAIR_KINDS[spec.loss],
                beta=spec.beta,
                smoothing=spec.label_smoothing,
                margin=spec.margin if spec.loss == "simpo" else 0.0,
                reference_chosen=float(reference_P2[index // 2, 0]),
                reference_rejected=float(reference_P2[index // 2, 1]),
                chosen_tokens=targets[index],
                rejected_tokens=targets[index + 1],
                weight=weight,
                sft=sft,
            )
            rejected = Rejected(sides[index + 1], terms)
            items.append(replace(item, index=index // 2, weight=weight, rejected=rejected))
    return items


def sum_pairs(batches: Sequence[tuple[Sequence[Item], Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Loss `[]` and scores `[6]` of each complete batch, fp64; one all-reduce over the world.

    Args:
        batches: all items of each, and this rank's `-log p` of their rows.
    """
    if not batches:
        return []
    joined = torch.cat([nll_T for _, nll_T in batches])
    dist.all_reduce(joined)  # a row ran on one rank that counts
    parts, found = joined.split([len(nll_T) for _, nll_T in batches]), []
    for (items, _), nll_T in zip(batches, parts, strict=True):
        lengths = torch.tensor([len(side.tokens) - 1 for item in items for side in item.sides])
        sums_G = segment_sums(nll_T, to_device(lengths, nll_T.device), exact=True)
        found.append(scored(-sums_G.double(), items))
    return found


def scored(logps_G: Tensor, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
    """Loss `[]` and scores `[6]` of a batch of pairs, fp64, from each side's log-probability."""
    logps_P2 = logps_G.view(-1, 2)
    loss_P, _, reward_P2 = pair_losses(logps_P2, to_device(terms_of(items), logps_G.device))
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    columns = [*reward_P2.t(), (margin_P > 0).double(), margin_P, *logps_P2.t()]
    return loss_P.sum(), torch.stack(columns).mean(dim=1)


def named(scores: Tensor) -> Scores:
    """Scores by name; waits for the device."""
    return dict(zip(SCORES, scores.tolist(), strict=True))
