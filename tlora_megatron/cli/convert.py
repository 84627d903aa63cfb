"""`tlora convert`: writes a Hugging Face model as a Megatron-LM checkpoint for any layout.

With `--adapter` it writes an adapter of that model whose experts share factors as servers keep it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from tlora_megatron.cli.tables import open_console
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec, refuse_gpt_oss

if TYPE_CHECKING:
    import torch

    from tlora_megatron.training.formats.fingerprint import Fingerprint
    from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, WeightSource
    from tlora_megatron.training.formats.megatron_checkpoint import MegatronCheckpoint


def convert_adapter(args: argparse.Namespace) -> int:
    """Writes the adapter in OUT; what its experts share stands there once.

    Raises:
        ValueError: if it is no adapter of the base, or its experts do not share the outer factors.
    """
    source, out = Path(args.adapter), Path(args.out)
    spec = read_model_spec(Path(args.model) / "config.json")

    import torch

    from tlora_megatron.training.formats import peft as peft_format
    from tlora_megatron.training.run.preparation import shared_by_experts

    adapter = shared_by_experts(peft_format.load_adapter(source, model=spec), str(source))
    stored = peft_format.stored_dtype(source)
    dtype = getattr(torch, args.dtype) if args.dtype else stored
    peft_format.check_adapter_directory(out)
    if not args.dry_run:
        peft_format.export_adapter(
            out,
            lora=adapter.lora,
            factors=adapter.factors,
            model=spec,
            base_model=adapter.base_model or args.model,
            quantisation=adapter.quantisation,
            dtype=dtype,
            stacks_experts=True,
        )
    dtype = str(dtype).removeprefix("torch.")
    result = {
        "adapter": str(out.resolve()),
        "written": not args.dry_run,
        "dtype": dtype,
        "parameters": sum(factor.numel() for factor in adapter.factors.values()),
    }
    _print(args, result, f"{result['adapter']}: {result['parameters']:,} parameters in {dtype}")
    return 0


_DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_EPILOG = """\
examples:
  tlora convert /models/Llama-3.1-8B checkpoints/llama3.1-8b
  tlora convert /models/Llama-3.1-8B checkpoints/llama3.1-8b --dry-run --json
  tlora convert /models/Qwen3-30B-A3B served/a --adapter runs/x/jobs/a/adapter

The printed flags are also in OUT/model_flags.txt, one word per line:
  mapfile -t MODEL_FLAGS < OUT/model_flags.txt
  torchrun ... pretrain_gpt.py "${MODEL_FLAGS[@]}" --load OUT ...
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a Hugging Face model as a Megatron-LM checkpoint",
        description="Writes a Hugging Face model as a Megatron-LM checkpoint for any layout.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        metavar="HF_DIR",
        help="Hugging Face directory with config.json and safetensors files",
    )
    parser.add_argument(
        "out", metavar="OUT", help="new directory for the checkpoint, for Megatron-LM's --load"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype to write (default: as stored)")
    parser.add_argument(
        "--no-fingerprint",
        action="store_true",
        help="leave out the forward in float32 by which a run recognises this base",
    )
    parser.add_argument(
        "--fingerprint-only",
        action="store_true",
        help="write only the fingerprint, into OUT, which may be HF_DIR: for tlora train and "
        "DeepSpeed",
    )
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="write not the model but this adapter of it, one tensor for all experts of a layer "
        "and once what they share, as vLLM and SGLang take it (jobs with expert_sharing: outer)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and print the flags, but write nothing",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Converts, and prints the Megatron-LM flags that belong to the checkpoint."""
    if args.adapter is not None:
        return convert_adapter(args)
    if args.fingerprint_only:
        return _run_fingerprint(args)
    model, out = Path(args.model), Path(args.out)
    spec = read_model_spec(model / "config.json")
    refuse_gpt_oss(spec.model_type, "a base that is converted")

    import torch

    from tlora_megatron.training.formats import megatron_checkpoint
    from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint

    begin_s = time.perf_counter()
    source = HFCheckpoint(model)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    planned = megatron_checkpoint.plan_megatron_checkpoint(spec, source, dtype)
    extra: list[str] = []
    if any((model / name).is_file() for name in _TOKENIZER_FILES):
        path = str(model.resolve())
        extra = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]
    megatron_checkpoint.check_destination(out, planned.size_bytes)
    if not args.dry_run:
        console = open_console(stderr=True)
        taken = None if args.no_fingerprint else _fingerprint(spec, source, planned.dtype, console)
        _write(spec, source, out, planned, extra, taken, console)
    result = {
        "checkpoint": str(out.resolve()),
        "written": not args.dry_run,
        "dtype": str(planned.dtype).removeprefix("torch."),
        "parameters": planned.num_parameters,
        "size_bytes": planned.size_bytes,
        "time_s": time.perf_counter() - begin_s,
        "flags": [*planned.flags, *extra],
    }
    _print(
        args,
        result,
        f"{result['checkpoint']}: {result['parameters']:,} parameters in {result['dtype']}, "
        f"{planned.size_bytes / 1e9:,.2f} GB, {result['time_s']:,.1f} s",
    )
    return 0


def _write(
    spec: ModelSpec,
    source: HFCheckpoint,
    out: Path,
    planned: MegatronCheckpoint,
    extra: list[str],
    fingerprint: Fingerprint | None,
    console: Console,
) -> None:
    from tlora_megatron.training.formats.megatron_checkpoint import write_megatron_checkpoint

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Not drawn where the output is a file: a bar would leave only its last state there.
    if not console.is_terminal:
        console.print(f"writing {planned.size_bytes / 1e9:,.2f} GB to {out}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=planned.size_bytes)
        write_megatron_checkpoint(
            spec,
            source,
            out,
            planned,
            extra_flags=extra,
            fingerprint=fingerprint,
            on_bytes=lambda count: progress.advance(bar, count),
        )


def _fingerprint(
    spec: ModelSpec, source: WeightSource, dtype: torch.dtype, console: Console
) -> Fingerprint:
    """Scores the fingerprint's text, on a GPU if there is one."""
    import torch

    from tlora_megatron.training.formats.fingerprint import make_fingerprint

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns = (TextColumn("fingerprint"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if not console.is_terminal:
        console.print(f"computing the fingerprint on {device.type}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=spec.num_layers)
        return make_fingerprint(
            spec, source, dtype=dtype, device=device, on_layer=lambda _: progress.advance(bar)
        )


def _run_fingerprint(args: argparse.Namespace) -> int:
    model, out = Path(args.model), Path(args.out)
    spec = read_model_spec(model / "config.json")

    import torch

    from tlora_megatron.training.formats.fingerprint import FILE_NAME, write_fingerprint
    from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint, weight_source
    from tlora_megatron.training.formats.hf_convert import check_weights

    if not out.is_dir():
        raise ValueError(f"OUT must be an existing directory with --fingerprint-only, got {out}")
    source = weight_source(spec, HFCheckpoint(model), torch.device("cpu"))
    check_weights(spec, source)
    console = open_console(stderr=True)
    # Runs read the weights as they are stored, whatever type that is.
    fingerprint = _fingerprint(spec, source, torch.float32, console)
    if not args.dry_run:
        write_fingerprint(out, fingerprint)
    result = {"fingerprint": str((out / FILE_NAME).resolve()), "written": not args.dry_run}
    _print(args, result, str(result["fingerprint"]))
    return 0


def _print(args: argparse.Namespace, result: dict[str, Any], what: str) -> None:
    """Prints the result as JSON, or what was written and a line for each of its flags."""
    if args.json:
        print(json.dumps(result, indent=2))
        return
    console = open_console()
    console.print(f"{'wrote' if result['written'] else 'would write'} {what}", style="bold")
    if "flags" in result:
        words = (f"\n  {word}" if word.startswith("--") else f" {word}" for word in result["flags"])
        console.print(f"the model's flags for Megatron-LM:{''.join(words)}")
