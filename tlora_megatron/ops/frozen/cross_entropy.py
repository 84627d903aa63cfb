"""Cross-entropy whose gradient takes the place of the logits; the vocabulary may be split.

Semantics, for a row of logits x over the whole vocabulary and its label y, in fp32:

    loss = log(sum_v exp(x_v - max x)) - (x_y - max x)
    gradient_v = exp(x_v - logsumexp x) - [v = y], rounded to the dtype of the logits

The logits are read in their own dtype and overwritten with the gradient, so no fp32 copy of them
ever exists. Columns from `valid` on only fill the vocabulary up: they count as minus infinity.

Shapes: n rows, V columns of this rank's part of the vocabulary.
"""

from __future__ import annotations

import torch

from tlora_megatron.ops.lora.kernel_choice import runs_triton


def cross_entropy_(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, valid: int, *, gradient: bool
) -> torch.Tensor:
    """Returns every row's loss, fp32 `[n]`, and may write its gradient over the logits.

    Args:
        logits_nV: contiguous, the whole vocabulary.
        labels_n: int64; a row whose label is no column has a meaningless loss.
        valid: columns that are tokens.
        gradient: of each row's own loss; without it the logits stay as they are.
    """
    if gradient and runs_triton(logits_nV):
        # Not at the top: triton is only there on machines with a GPU.
        from tlora_megatron.ops.frozen.triton.cross_entropy import launch_statistics

        parts_3n = launch_statistics(logits_nV, labels_n, valid, gradient=True)
        return merge_statistics(parts_3n[None])[0]
    losses_n, lse_n = merge_statistics(row_statistics(logits_nV, labels_n, valid)[None])
    if gradient:
        write_gradient_(logits_nV, labels_n, lse_n, valid)
    return losses_n


def row_statistics(logits_nV: torch.Tensor, labels_n: torch.Tensor, valid: int) -> torch.Tensor:
    """Returns maximum, sum of exponentials below it, and the label's logit, fp32 `[3, n]`.

    They are of this rank's part of the vocabulary: the logit is 0 where the label is elsewhere.
    """
    if runs_triton(logits_nV):
        from tlora_megatron.ops.frozen.triton.cross_entropy import launch_statistics

        return launch_statistics(logits_nV, labels_n, valid, gradient=False)
    return row_statistics_reference(logits_nV, labels_n, valid)


def row_statistics_reference(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, valid: int
) -> torch.Tensor:
    """The definition of `row_statistics`."""
    logits_nV = logits_nV[:, :valid].float()
    if valid == 0:
        zeros_n = logits_nV.new_zeros(len(labels_n))
        return torch.stack([zeros_n - torch.inf, zeros_n, zeros_n])
    largest_n = logits_nV.amax(dim=1)
    sum_n = (logits_nV - largest_n[:, None]).exp().sum(dim=1)
    here_n = (labels_n >= 0) & (labels_n < valid)
    index_n1 = torch.where(here_n, labels_n, 0)[:, None]
    target_n = torch.where(here_n, logits_nV.gather(1, index_n1)[:, 0], 0.0)
    return torch.stack([largest_n, sum_n, target_n])


def merge_statistics(parts_r3n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and logsumexps, fp32 `[n]`, from the statistics of all parts of the vocabulary."""
    largest_n = parts_r3n[:, 0].amax(dim=0)
    sums_rn = parts_r3n[:, 1] * (parts_r3n[:, 0] - largest_n).exp()
    log_n = sums_rn.sum(dim=0).log()
    return log_n - (parts_r3n[:, 2].sum(dim=0) - largest_n), log_n + largest_n


def write_gradient_(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, lse_n: torch.Tensor, valid: int
) -> None:
    """Overwrites logits with the gradients of their rows' losses."""
    if runs_triton(logits_nV):
        from tlora_megatron.ops.frozen.triton.cross_entropy import launch_gradient

        launch_gradient(logits_nV, labels_n, lse_n, valid)
    else:
        write_gradient_reference_(logits_nV, labels_n, lse_n, valid)


def write_gradient_reference_(
    logits_nV: torch.Tensor, labels_n: torch.Tensor, lse_n: torch.Tensor, valid: int
) -> None:
    """The definition of `write_gradient_`."""
    columns_V = torch.arange(valid, device=logits_nV.device)
    grad_nV = (logits_nV[:, :valid].float() - lse_n[:, None]).exp()
    grad_nV -= (columns_V == labels_n[:, None]).float()
    logits_nV[:, :valid] = grad_nV
    logits_nV[:, valid:] = 0
