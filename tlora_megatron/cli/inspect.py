"""`tlora inspect`: shows a configuration, an adapter, a run, or this machine's kernels."""

from __future__ import annotations

import argparse
import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tlora_megatron.cli.tables import open_console, print_adapter, print_config, print_run
from tlora_megatron.cli.train import add_config_arguments
from tlora_megatron.config.load import config_to_dict, load_config
from tlora_megatron.config.reader import must
from tlora_megatron.files import read_object
from tlora_megatron.model.quantisation import ADAPTER_METADATA

_EPILOG = """\
examples:
  tlora inspect configs/quickstart.yaml --set defaults.lora.rank=8
  tlora inspect runs/quickstart
  tlora inspect runs/quickstart/jobs/mirror/adapter --json
  tlora inspect kernels
  tlora inspect kernels --build
"""

KERNELS = "kernels"
"""Word that shows the kernels; a folder of this name is given as `./kernels`."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_parser(commands: Any) -> None:
    """Adds the subcommand to argparse's `commands`."""
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
        "--build",
        action="store_true",
        help="with 'kernels': compile the CUDA kernels into the cache, also without a GPU, as for "
        "an image",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Shows what is at `PATH`, or the kernels."""
    path = Path(args.path)
    if (path.is_dir() or args.path == KERNELS) and (args.overrides or args.output_dir):
        raise ValueError(f"--set and --output-dir must be given with a config file, got {path}")
    if args.build and args.path != KERNELS:
        raise ValueError(f"--build must be given with {KERNELS}, got {path}")
    if args.path == KERNELS:
        if args.build:
            _build_kernels()
        return _show_kernels(as_json=args.json)
    if path.is_dir():
        if (path / ADAPTER_CONFIG).is_file():
            return _show_adapter(path, as_json=args.json)
        if (path / "summary.json").is_file():
            return _show_run(path, as_json=args.json)
        raise ValueError(
            f"PATH must be a config file, or a directory with {ADAPTER_CONFIG} or summary.json, "
            f"got {path}"
        )
    return _show_config(args)


def _build_kernels() -> None:
    from tlora_megatron.ops import kernel_build

    logging.getLogger(kernel_build.__name__).setLevel(logging.INFO)
    library = kernel_build.built_library()
    if not library.exists():
        kernel_build.build(library)


def _show_config(args: argparse.Namespace) -> int:
    config = load_config(args.path, args.overrides, args.output_dir)
    if args.json:
        errors = [asdict(error) for error in config.job_errors]
        _print_json({"kind": "config", **config_to_dict(config), "job_errors": errors})
    else:
        print_config(open_console(), config)
    return 0


def _show_adapter(path: Path, *, as_json: bool) -> int:
    adapter = read_adapter(path)
    if as_json:
        _print_json({"kind": "adapter", **adapter})
    else:
        print_adapter(open_console(), adapter)
    return 0


def _show_run(path: Path, *, as_json: bool) -> int:
    summary = _object_in(path / "summary.json")
    if "jobs" not in summary:  # of one job of a service, in the job's own folder
        summary = {"run": {}, "jobs": {path.name: summary}}
    if as_json:
        _print_json({"kind": "run", "path": str(path), **summary})
    else:
        print_run(open_console(), summary, str(path))
    return 0


def _show_kernels(*, as_json: bool) -> int:
    # Not at the top: it needs torch, and configs can be shown without it.
    from tlora_megatron.cli.inspect_kernels import describe_kernels, print_kernels

    description = describe_kernels()
    if as_json:
        _print_json({"kind": "kernels", **description})
    else:
        print_kernels(open_console(), description)
    return 0


def read_adapter(path: Path) -> dict[str, Any]:
    """Describes a PEFT adapter from its config and the header of its weights, if both are whole."""
    # Not at the top: safetensors belongs to the extra [train], and configs can be shown without it.
    from safetensors import SafetensorError, safe_open

    config = _object_in(path / ADAPTER_CONFIG)
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


def _object_in(path: Path) -> dict[str, Any]:
    found = read_object(path)
    if found is None:
        raise ValueError(f"{path} must be there, got no such file")
    return found


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))
