"""Names the flags of a command that Megatron-LM knows and that jobs do not follow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unused:
    """Flags that change nothing, and why."""

    why: str
    flags: tuple[str, ...]


UNUSED = (
    _Unused(
        why="each job has its own optimizer and schedule",
        flags=(
            *("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--warmup"),
            *("--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples"),
            *("--lr-wsd-decay-style", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
            *("--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples"),
            *("--lr-warmup-init", "--use-checkpoint-opt_param-scheduler"),
            *("--use-checkpoint-opt-param-scheduler", "--override-opt_param-scheduler"),
            *("--override-opt-param-scheduler", "--weight-decay", "--weight-decay-incr-style"),
            *("--start-weight-decay", "--end-weight-decay", "--clip-grad", "--optimizer"),
            *("--adam-beta1", "--adam-beta2", "--adam-eps", "--sgd-momentum"),
            *("--optimizer-cpu-offload", "--optimizer-offload-fraction"),
            *("--use-torch-optimizer-for-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"),
            *("--use-precision-aware-optimizer", "--main-grads-dtype", "--main-params-dtype"),
            *("--exp-avg-dtype", "--exp-avg-sq-dtype", "--no-weight-decay-cond-type"),
            *("--apply-wd-to-qk-layernorm", "--head-lr-mult"),
        ),
    ),
    _Unused(
        why="adapters' gradients are summed in fp32",
        flags=("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"),
    ),
    _Unused(
        why="each job names its own data",
        flags=(
            *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
            *("--data-args-path", "--per-split-data-args-path", "--split", "--data-cache-path"),
            *("--mock-data", "--sft", "--sft-tokenizer-prompt-format", "--dataloader-type"),
            *("--num-workers", "--no-create-attention-mask-in-dataloader", "--eod-mask-loss"),
            *("--reset-position-ids", "--reset-attention-mask", "--fim-data"),
            *("--fim-rate", "--fim-spm-rate", "--dataloader-inter-document-masking"),
        ),
    ),
    _Unused(
        why="jobs are evaluated on their own data.eval",
        flags=(
            *("--eval-iters", "--eval-interval", "--full-validation", "--start-eval-at-iter"),
            *("--eval-global-batch-size", "--eval-micro-batch-size", "--multiple-validation-sets"),
        ),
    ),
    _Unused(
        why="jobs are saved by this package, and the base never",
        flags=(
            *("--async-save", "--async-strategy", "--use-persistent-ckpt-worker"),
            *("--no-save-optim", "--no-save-rng", "--save-retain-interval"),
            *("--non-persistent-save-interval", "--non-persistent-ckpt-type"),
            *("--ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save"),
            "--ckpt-assume-constant-structure",
        ),
    ),
    _Unused(
        why="attention over packed sequences is this package's",
        flags=("--attention-backend", "--use-flash-attn"),
    ),
)

_SWITCHES = (
    *("optimizer_cpu_offload", "use_precision_aware_optimizer", "async_save", "sft", "fim_data"),
    *("use_persistent_ckpt_worker", "full_validation", "eod_mask_loss", "reset_position_ids"),
    "reset_attention_mask",
)
_VALUES = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    *("per_split_data_args_path", "non_persistent_save_interval", "non_persistent_ckpt_type"),
    *("save_retain_interval", "lr_decay_iters", "lr_decay_samples", "lr_warmup_fraction"),
    *("decoupled_lr", "decoupled_min_lr", "start_weight_decay", "end_weight_decay"),
)
_NUMBERS = ("lr_warmup_iters", "lr_warmup_samples", "min_lr", "eval_iters")
_SWITCHED_OFF: dict[str, object] = {
    **dict.fromkeys(_SWITCHES, False),
    **dict.fromkeys(_VALUES),
    **dict.fromkeys(_NUMBERS, 0),
    "weight_decay_incr_style": "constant",
}
"""Values under which Megatron's own checks find nothing to say about flags that are not used."""


def switch_off(args: argparse.Namespace) -> None:
    """Sets arguments that nothing follows to values that Megatron accepts; call it before its own
    checks."""
    for name, value in _SWITCHED_OFF.items():
        if hasattr(args, name):
            setattr(args, name, value)
    # Megatron asks for one whatever the optimizer.
    args.lr = 0.0 if args.lr is None else args.lr


def describe_unused(words: Sequence[str]) -> str | None:
    """Returns one line about the given flags that change nothing; None where there are none.

    Args:
        words: the command line, as given.
    """
    given = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("--"))
    if _is_zero(words, "--eval-iters"):
        del given["--eval-iters"]  # what it says is what happens
    parts = []
    for group in UNUSED:
        if flags := [flag for flag in given if flag in group.flags]:
            parts.append(f"{', '.join(flags)} ({group.why})")
    return "; ".join(parts) or None


def _is_zero(words: Sequence[str], flag: str) -> bool:
    """True if the last value given for the flag is 0."""
    values = [word.split("=", 1)[1] for word in words if word.startswith(f"{flag}=")]
    values += [after for word, after in pairwise(words) if word == flag]
    return values[-1:] == ["0"]
