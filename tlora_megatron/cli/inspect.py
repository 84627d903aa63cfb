"""`tlora inspect`: shows a configuration, an adapter, a run, or this machine's kernels."""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tlora_megatron.cli.data import describe_data, print_data
from tlora_megatron.cli.tables import (
    open_console,
    print_adapter,
    print_config,
    print_run,
)
from tlora_megatron.cli.train import add_config_arguments
from tlora_megatron.config.load import config_to_dict, load_config
from tlora_megatron.config.reader import must
from tlora_megatron.files import read_object
from tlora_megatron.model.quantisation import ADAPTER_METADATA

_EPILOG = """\
examples:
  tlora inspect configs/quickstart.yaml --set defaults.lora.rank=8
  tlora inspect configs/quickstart.yaml --data
  tlora inspect runs/quickstart
  tlora inspect runs/quickstart/jobs/mirror/adapter --json
  tlora inspect kernels
  tlora inspect kernels --build
"""

KERNELS = "kernels"
"""Word that shows the kernels; a folder of this name is given as `./kernels`."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show a configuration, an adapter, a run or the kernels",
        description="Shows a configuration, an adapter, a run, or this machine's kernels.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="configuration file, adapter directory or run directory; or the word 'kernels', which "
        "shows the kernels that train on this machine and why (compiles them if needed)",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--data",
        action="store_true",
        help="with a configuration file: tokenize each job's data; show rows, tokens, steps and "
        "one row as it is trained, or the first five bad lines",
    )
    parser.add_argument(
        "--build",
        action="store_true",
        help="with 'kernels': compile the CUDA kernels into the cache, also without a GPU, as for "
        "an image",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Shows what is at `PATH`, or the kernels; returns 1 if `--data` finds bad data."""
    path = Path(args.path)
    if (path.is_dir() or args.path == KERNELS) and (args.overrides or args.output_dir):
        raise ValueError(f"--set and --output-dir must be given with a config file, got {path}")
    if args.build and args.path != KERNELS:
        raise ValueError(f"--build must be given with {KERNELS}, got {path}")
    if args.data and (path.is_dir() or args.path == KERNELS):
        raise ValueError(f"--data must be given with a config file, got {path}")
    document, show = _found(args, path)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        show(open_console())
    return int(args.data and any("errors" in data for data in document["jobs"].values()))


def _found(
    args: argparse.Namespace, path: Path
) -> tuple[dict[str, Any], Callable[[Console], None]]:
    """The document that `--json` prints, and what prints the same for a person."""
    if args.path == KERNELS:
        # Not at the top: it needs torch, and configs can be shown without it.
        from tlora_megatron.cli.inspect_kernels import describe_kernels, print_kernels

        if args.build:
            from tlora_megatron.ops import kernel_build

            logging.getLogger(kernel_build.__name__).setLevel(logging.INFO)
            if not (library := kernel_build.built_library()).exists():
                kernel_build.build(library)
        kernels = describe_kernels()
        return {"kind": "kernels", **kernels}, lambda console: print_kernels(console, kernels)
    if not path.is_dir():
        config = load_config(args.path, args.overrides, args.output_dir)
        errors = [asdict(error) for error in config.job_errors]
        if args.data:
            data = describe_data(config)
            document = {"kind": "data", "jobs": data, "job_errors": errors}
            return document, lambda console: print_data(console, data)
        document = {"kind": "config", **config_to_dict(config), "job_errors": errors}
        return document, lambda console: print_config(console, config)
    if (path / ADAPTER_CONFIG).is_file():
        adapter = read_adapter(path)
        return {"kind": "adapter", **adapter}, lambda console: print_adapter(console, adapter)
    if not (path / "summary.json").is_file():
        raise ValueError(
            f"PATH must be a config file, or a directory with {ADAPTER_CONFIG} or summary.json, "
            f"got {path}"
        )
    summary = read_object(path / "summary.json") or {}
    if "jobs" not in summary:  # of one job of a service, in the job's own folder
        name = (read_object(path / "job.json") or {}).get("name", path.name)
        summary = {"run": {}, "jobs": {name: summary}}
    document = {"kind": "run", "path": str(path), **summary}
    return document, lambda console: print_run(console, summary, str(path))


def read_adapter(path: Path) -> dict[str, Any]:
    """Describes a PEFT adapter from its config and the header of its weights, if both are whole."""
    # Not at the top: safetensors belongs to the extra [train], and configs can be shown without it.
    from safetensors import SafetensorError, safe_open

    config = read_object(path / ADAPTER_CONFIG) or {}
    weights = path / ADAPTER_WEIGHTS
    try:
        with safe_open(weights, framework="numpy") as file:
            slices = [file.get_slice(key) for key in file.keys()]  # noqa: SIM118, not a dict
            shapes = [tuple(item.get_shape()) for item in slices]
            dtypes = sorted({str(item.get_dtype()) for item in slices})
            quantization = (file.metadata() or {}).get(ADAPTER_METADATA)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter must hold a readable {ADAPTER_WEIGHTS}, got {error}") from error
    targets, blocks = config.get("target_modules"), config.get("use_bdlora") or {}
    if not isinstance(blocks, dict):
        raise must("use_bdlora", "be a JSON object", blocks)
    return {
        "path": str(path),
        "base": config.get("base_model_name_or_path"),
        **({} if quantization is None else {"base_quantization": quantization}),
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "use_rslora": config.get("use_rslora", False),
        "num_blocks": blocks.get("nblocks", 1),
        "target_modules": sorted(targets) if isinstance(targets, list) else targets,
        "tensors": len(shapes),
        "parameters": sum(math.prod(shape) for shape in shapes),
        "dtypes": dtypes,
        "file_bytes": weights.stat().st_size,
    }
