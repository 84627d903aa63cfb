"""Says in sentences which scripts, flags and checkpoints jobs cannot follow, and which they ignore.

`check_script` and `check_parsed` come before Megatron's own code; `explain_arguments` and
`explain_loading` put what it raised into words.
"""

from __future__ import annotations

import argparse
import importlib
import re
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tlora_megatron.integrations.megatron_lm.guard import FLAG, RULES, layer_pattern

_TRACKER = "latest_checkpointed_iteration.txt"
_STATE_SPACE = "state-space layers carry a document's state into the next"
_OTHER_SCRIPTS = {
    "pretrain_vlm.py": "its model reads images",
    "train_rl.py": "reinforcement learning makes its own data",
    "pretrain_bert.py": "its model is no decoder",
    "pretrain_t5.py": "its model has an encoder",
    "pretrain_ict.py": "its model is no decoder",
    "pretrain_vision_classify.py": "its model reads images",
    "pretrain_vision_dino.py": "its model reads images",
    "pretrain_vision_inpaint.py": "its model reads images",
}
_PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")

_ABSENT = re.compile(r"(\S+) from model not in state dict")
_SHAPES = re.compile(
    r"Global shape mismatch for loaded \((?P<loaded>.*?)\) and expected \((?P<expected>.*)\) tensor"
    r" for key (?P<key>\S+)"
)


def check_script(script: Path, words: Sequence[str]) -> None:
    """Refuses scripts of Megatron-LM whose models cannot carry the jobs' adapters."""
    why = _OTHER_SCRIPTS.get(script.name)
    given = {word.split("=")[0] for word in words}
    if script.name == "pretrain_mamba.py" and not given.intersection(_PATTERNS):
        why = _STATE_SPACE
    if why is not None:
        raise ValueError(
            f"SCRIPT must train a GPT model with {FLAG}, as pretrain_gpt.py does, got "
            f"{script.name}: {why}"
        )


def check_parsed(args: argparse.Namespace) -> None:
    """Refuses what Megatron's own checks, or its builder, would end with a traceback.

    Args:
        args: Megatron's, parsed and not validated.
    """
    if args.hidden_size is None:
        raise ValueError(
            f"the model's flags must be given with {FLAG}, got no --hidden-size; `tlora convert` "
            f"writes them to model_flags.txt beside the checkpoint"
        )
    for rule in RULES:
        # Switches alone: the values of other arguments may still follow from the validation.
        if getattr(args, rule.argument, None) is True and False in rule.allowed:
            rule.check(args)
    pattern = layer_pattern(args)
    if pattern is not None and "M" in pattern:
        raise ValueError(
            f"--hybrid-layer-pattern must have attention and MLP layers alone with {FLAG}, got "
            f"{pattern}; {_STATE_SPACE}"
        )
    if args.save and not args.save_interval:
        raise ValueError(
            f"--save-interval must be given with {FLAG}, got none; it is the iterations between "
            f"two saves of the jobs, and what a killed run may lose"
        )
    positions = args.max_position_embeddings
    if positions is not None and args.seq_length is not None and args.seq_length > positions:
        raise ValueError(
            f"--max-position-embeddings must be at least --seq-length {args.seq_length}, got "
            f"{positions}; a packed row holds many sequences, so give --max-position-embeddings "
            f"{args.seq_length} and keep each job's max_seq_len within what the base was made for"
        )
    _check_implementation(args)


def _check_implementation(args: argparse.Namespace) -> None:
    """Refuses layers of Transformer Engine where it cannot be imported."""
    if args.transformer_impl != "transformer_engine" or getattr(args, "spec", None) is not None:
        return  # a spec of the user's own says which layers there are
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        raise ValueError(
            f"--transformer-impl must be local where Transformer Engine cannot be imported, got "
            f"transformer_engine, Megatron's default ({error}); local wants "
            f"--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
            f"beside it where apex is missing, too"
        ) from error


def detect_format(args: argparse.Namespace) -> str | None:
    """Sets `--ckpt-format` to that of the base in `--load`, where only the other way would fail.

    Megatron reads a distributed checkpoint only under its own name, and finds out by itself that
    one is in the old format.

    Returns:
        A sentence where the given format has no effect, or None.
    """
    if args.ckpt_format != "torch" or getattr(args, "auto_detect_ckpt_format", False):
        return None
    sources = filter(None, (args.load, args.pretrained_checkpoint))
    folder = next((source for source in sources if (Path(source) / _TRACKER).is_file()), None)
    if folder is None:
        return None
    iteration = (Path(folder) / _TRACKER).read_text().strip()
    name = f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration
    if not (Path(folder) / name / "metadata.json").is_file():
        return None
    args.ckpt_format = "torch_dist"
    return f"--ckpt-format torch (the base in {folder} is a distributed checkpoint)"


def explain_arguments(error: Exception) -> ValueError:
    """Makes a sentence of what Megatron's own validation raised, which may be a bare assertion."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error) or f"{frame.line}"
    return ValueError(
        f"Megatron-LM's arguments must pass its own check ({Path(frame.filename).name}:"
        f"{frame.lineno}), got: {said}"
    )


def explain_loading(error: BaseException, args: argparse.Namespace) -> ValueError | None:
    """Makes a sentence of what Megatron's loader raised; None for what is not about the model."""
    text = str(error)
    rule = f"--load {args.load} must hold the model that the arguments describe"
    if absent := _ABSENT.search(text):
        name = absent[1].strip("'\"")
        is_moe = args.num_experts and (".router." in name or ".experts." in name)
        remedy = f"; --num-experts {args.num_experts} is for a base of experts" if is_moe else ""
        return ValueError(f"{rule}, got no {name} in it{remedy}")
    if shapes := _SHAPES.search(text):
        return ValueError(
            f"{rule}, got {shapes['key'].rstrip('.')} of {shapes['loaded']} where they ask for "
            f"{shapes['expected']}"
        )
    return error if isinstance(error, ValueError) else None


UNUSED: Mapping[str, tuple[str, ...]] = {
    "each job has its own optimizer and schedule": (
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
    "adapters' gradients are summed in fp32": (
        *("--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"),
    ),
    "each job names its own data": (
        *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
        *("--data-args-path", "--per-split-data-args-path", "--split", "--data-cache-path"),
        *("--mock-data", "--sft", "--sft-tokenizer-prompt-format", "--dataloader-type"),
        *("--num-workers", "--no-create-attention-mask-in-dataloader", "--eod-mask-loss"),
        *("--reset-position-ids", "--reset-attention-mask", "--fim-data"),
        *("--fim-rate", "--fim-spm-rate", "--dataloader-inter-document-masking"),
    ),
    "jobs are evaluated on their own data.eval": (
        *("--eval-iters", "--eval-interval", "--full-validation", "--start-eval-at-iter"),
        *("--eval-global-batch-size", "--eval-micro-batch-size", "--multiple-validation-sets"),
    ),
    "jobs are saved by this package, and the base never": (
        *("--async-save", "--async-strategy", "--use-persistent-ckpt-worker"),
        *("--no-save-optim", "--no-save-rng", "--save-retain-interval"),
        *("--non-persistent-save-interval", "--non-persistent-ckpt-type"),
        *("--ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save"),
        "--ckpt-assume-constant-structure",
    ),
    "attention over packed sequences is this package's": (
        *("--attention-backend", "--use-flash-attn"),
    ),
}
"""Why -> flags that change nothing."""

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
    """Returns one line about the given flags that change nothing; None where there are none."""
    given = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("--"))
    iterations = [word.split("=", 1)[1] for word in words if word.startswith("--eval-iters=")]
    iterations += [after for word, after in pairwise(words) if word == "--eval-iters"]
    if iterations[-1:] == ["0"]:
        del given["--eval-iters"]  # what it says is what happens
    parts = []
    for why, unused in UNUSED.items():
        if flags := [flag for flag in given if flag in unused]:
            parts.append(f"{', '.join(flags)} ({why})")
    return "; ".join(parts) or None
