"""`tlora convert`: writes a Hugging Face model as a Megatron-LM checkpoint for any layout."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from tlora_megatron.cli.console import open_console
from tlora_megatron.model.spec import ModelSpec, read_model_spec

if TYPE_CHECKING:
    from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint
    from tlora_megatron.training.formats.megatron_checkpoint import MegatronCheckpoint

_DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_EPILOG = """\
examples:
  tlora convert /models/Llama-3.1-8B checkpoints/llama3.1-8b
  tlora convert /models/Llama-3.1-8B checkpoints/llama3.1-8b --dry-run --json

The printed flags are also in OUT/model_flags.txt, one word per line:
  mapfile -t MODEL_FLAGS < OUT/model_flags.txt
  torchrun ... pretrain_gpt.py "${MODEL_FLAGS[@]}" --load OUT ...
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "convert",
        help="write a Hugging Face model as a Megatron-LM checkpoint",
        description=__doc__.split(": ", 1)[1],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        "--dry-run",
        action="store_true",
        help="check everything and print the flags, but write nothing",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Converts, and prints the Megatron-LM flags that belong to the checkpoint."""
    model, out = Path(args.model), Path(args.out)
    spec = read_model_spec(model / "config.json")

    import torch

    from tlora_megatron.training.formats import megatron_checkpoint
    from tlora_megatron.training.formats.hf_checkpoint import HFCheckpoint

    begin_s = time.perf_counter()
    source = HFCheckpoint(model)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    planned = megatron_checkpoint.plan_megatron_checkpoint(spec, source, dtype)
    extra = _tokenizer_flags(model)
    if args.dry_run:
        megatron_checkpoint.check_destination(out, planned.size_bytes)
    else:
        _write(spec, source, out, planned, extra, open_console(stderr=True))
    result = {
        "checkpoint": str(out.resolve()),
        "written": not args.dry_run,
        "dtype": str(planned.dtype).removeprefix("torch."),
        "parameters": planned.num_parameters,
        "size_bytes": planned.size_bytes,
        "time_s": time.perf_counter() - begin_s,
        "flags": [*planned.flags, *extra],
    }
    _print(result, as_json=args.json)
    return 0


def _write(
    spec: ModelSpec,
    source: HFCheckpoint,
    out: Path,
    planned: MegatronCheckpoint,
    extra: list[str],
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
            on_bytes=lambda count: progress.advance(bar, count),
        )


def _tokenizer_flags(model: Path) -> list[str]:
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        return []
    path = str(model.resolve())
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path]


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    console = open_console()
    verb = "wrote" if result["written"] else "would write"
    console.print(
        f"{verb} {result['checkpoint']}: {result['parameters']:,} parameters in {result['dtype']}, "
        f"{result['size_bytes'] / 1e9:,.2f} GB, {result['time_s']:,.1f} s",
        style="bold",
    )
    console.print("the model's flags for Megatron-LM:")
    for line in _flag_lines(result["flags"]):
        console.print(f"  {line}")


def _flag_lines(words: list[str]) -> list[str]:
    """Lines of one flag each, with its value."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines
