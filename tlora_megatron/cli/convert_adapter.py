"""`tlora convert --adapter`: writes an adapter whose experts share factors as servers keep it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tlora_megatron.cli.console import open_console
from tlora_megatron.model.spec import read_model_spec


def run(args: argparse.Namespace) -> int:
    """Writes the adapter in OUT; what its experts share stands there once.

    Raises:
        ValueError: if it is no adapter of the base, or its experts do not share the outer factors.
    """
    source, out = Path(args.adapter), Path(args.out)
    spec = read_model_spec(Path(args.model) / "config.json")

    import torch

    from tlora_megatron.training.formats import peft as peft_format
    from tlora_megatron.training.formats.peft_fit import shared_by_experts

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
    result = {
        "adapter": str(out.resolve()),
        "written": not args.dry_run,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(factor.numel() for factor in adapter.factors.values()),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        verb = "wrote" if result["written"] else "would write"
        open_console().print(
            f"{verb} {result['adapter']}: {result['parameters']:,} parameters in {result['dtype']}",
            style="bold",
        )
    return 0
