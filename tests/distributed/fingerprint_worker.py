"""Worker: scores a base's fingerprint with Megatron models, the right one and wrong ones.

`fingerprint_worker.py FOLDER FILE CASE...`; FOLDER holds the base and its fingerprint, a CASE is
`KEY=VALUE,...` of tp, pp, cp, sp, dtype, engine (`own`; `built` as under Megatron-LM's trainer;
`te` with Transformer Engine), fp8 (a recipe), tokens (a micro-batch's) and wrong (a name of
`wrong_base.WRONG`, or `all`). The errors are written to FILE as JSON, by case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.variants import end_world, layout_of, options_of
from tests.helpers.wrong_base import WRONG, Wrong, build
from tlora_megatron.integrations.megatron import model as own
from tlora_megatron.integrations.megatron.engine import MegatronEngine
from tlora_megatron.integrations.megatron.process_groups import current_groups, initialize_parallel
from tlora_megatron.integrations.megatron_lm.engine import MegatronLmEngine
from tlora_megatron.integrations.megatron_lm.same_model import without_quantization
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.fingerprint import read_fingerprint
from tlora_megatron.training.run import fingerprint as check

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    spec = read_model_spec(folder / "config.json")
    errors: dict[str, float] = {}
    for case in sys.argv[3:]:
        options = options_of(case)
        layout = layout_of(options)
        initialize_parallel(layout)
        if options.get("wrong") == "all":
            for name, wrong in WRONG.items():
                errors[f"{case} {name}"] = error_of(spec, folder, layout, options, wrong)
        else:
            wrong = WRONG[options["wrong"]] if "wrong" in options else Wrong()
            errors[case] = error_of(spec, folder, layout, options, wrong)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(errors))
    end_world()


def error_of(
    spec: ModelSpec, folder: Path, layout: ParallelLayout, options: dict[str, str], wrong: Wrong
) -> float:
    """The error of one model; negative if it was refused."""
    fingerprint = read_fingerprint(folder)
    assert fingerprint is not None
    precision: Any = options.get("dtype", "float32")
    dtype, groups = DTYPES[precision], current_groups(layout)
    tokens = int(options.get("tokens", len(fingerprint.tokens)))
    if options.get("engine") == "own":
        model = own.build_backbone(spec, layout, dtype=dtype, recompute="none")
        own.load_backbone(model, spec, folder, layout)
        chunks: list[Any] = [model]
        engine: Any = MegatronEngine(model, groups, spec.vocab_size)
    else:
        te, recipe = options.get("engine") == "te", options.get("fp8")
        chunks = build(spec, folder, layout, dtype=dtype, wrong=wrong, te=te, fp8_recipe=recipe)
        engine = MegatronLmEngine(chunks, groups, vocab_size=spec.vocab_size, seq_length=tokens)
    found: list[float] = []
    measured = check.relative_error
    check.relative_error = lambda *args: found.append(measured(*args)) or found[-1]
    try:
        with without_quantization(chunks):
            check.check_base(
                engine, groups, fingerprint, where=str(folder), precision=precision,
                micro_batch_tokens=tokens, fills_budget=options.get("engine") != "own",
            )  # fmt: skip
        assert not any(_has_fp8_state(module) for chunk in chunks for module in chunk.modules())
        return max(found)
    except ValueError as error:
        if "the model must give the text of" not in str(error):
            raise
        return -max(found)
    finally:
        check.relative_error = measured


def _has_fp8_state(module: Any) -> bool:
    return "scaling_fwd" in getattr(module, "fp8_meta", {})


if __name__ == "__main__":
    main()
