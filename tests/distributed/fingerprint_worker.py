"""Worker: scores a base's fingerprint with Megatron models, the right one and wrong ones.

`fingerprint_worker.py FOLDER FILE CASE...`; FOLDER holds the base and its fingerprint, a CASE is
`KEY=VALUE,...` of tp, pp, cp, sp, dtype, engine (`own`; `built` as under Megatron-LM's trainer;
`te` with Transformer Engine), fp8 (a recipe), tokens (a micro-batch's) and wrong (a name of
`WRONG`, or `all`). The errors are written to FILE as JSON, by case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from tests.helpers.user_models import local_name
from tests.helpers.variants import end_world, layout_of, options_of
from tlora_megatron.integrations.megatron import model as own
from tlora_megatron.integrations.megatron.built.model import freeze, install_packed_attention
from tlora_megatron.integrations.megatron.engine import MegatronEngine
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import RMSNorm
from tlora_megatron.integrations.megatron.model import load_backbone, transformer_config
from tlora_megatron.integrations.megatron.process_groups import current_groups, initialize_parallel
from tlora_megatron.integrations.megatron_lm.engine import MegatronLmEngine
from tlora_megatron.integrations.megatron_lm.same_model import without_quantization
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.fingerprint import read_fingerprint
from tlora_megatron.training.run import fingerprint as check


@dataclass(frozen=True, kw_only=True)
class Wrong:
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of GPTModel."""
    weights: Callable[[dict[str, torch.Tensor]], None] = lambda _: None
    """Changes the loaded weights."""
    qk_l2_norm: bool = False


def _each(
    part: str, change: Callable[[torch.Tensor], object]
) -> Callable[[dict[str, torch.Tensor]], None]:
    def change_all(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if part in name:
                change(weight)

    return change_all


def _noise(weights: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in weights.values():
        weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=generator).to(weight))


def _swap_layers(weights: dict[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        if "layers.0." in name:
            other = weights[name.replace("layers.0.", "layers.1.")]
            kept = weight.clone()
            weight.copy_(other)
            other.copy_(kept)


def _turn(weight: torch.Tensor) -> None:
    """As if all queries came before keys and values."""
    weight.copy_(weight.roll(weight.shape[0] // 8, 0))


LLAMA3 = {"rope_scaling": True, "rope_scaling_factor": 8.0}
WRONG: dict[str, Wrong] = {
    "--rotary-base 1000000": Wrong(model={"rotary_base": 1000000}),
    "--rotary-base 500000": Wrong(model={"rotary_base": 500000}),
    "--use-rope-scaling": Wrong(model=LLAMA3),
    "--norm-epsilon 1e-6": Wrong(config={"layernorm_epsilon": 1e-6}),
    "--norm-epsilon 1e-4": Wrong(config={"layernorm_epsilon": 1e-4}),
    "--apply-layernorm-1p": Wrong(weights=_each("norm.weight", lambda w: w.add_(1.0))),
    "--glu-linear-offset 1.0": Wrong(config={"glu_linear_offset": 1.0}),
    "--use-mup: embeddings x 2": Wrong(weights=_each("word_embeddings", lambda w: w.mul_(2.0))),
    "--use-mup: logits x 0.5": Wrong(weights=_each("output_layer", lambda w: w.mul_(0.5))),
    "--softmax-scale 0.125": Wrong(config={"softmax_scale": 0.125}),
    "--activation-func-clamp-value 1": Wrong(config={"activation_func_clamp_value": 1.0}),
    "GELU in the place of SiLU": Wrong(config={"activation_func": F.gelu}),
    "--qk-l2-norm": Wrong(qk_l2_norm=True),
    "--rotary-percent 0.5": Wrong(model={"rotary_percent": 0.5}),
    "--rotary-interleaved": Wrong(config={"rotary_interleaved": True}),
    "--rotary-seq-len-interpolation-factor 2": Wrong(model={"seq_len_interpolation_factor": 2.0}),
    "--no-rope-freq 4": Wrong(config={"no_rope_freq": 4}),
    "another fine-tuning (weights off by 5 %)": Wrong(weights=_noise),
    "two layers swapped": Wrong(weights=_swap_layers),
    "gate and up swapped": Wrong(
        weights=_each("linear_fc1", lambda w: w.copy_(torch.cat(w.chunk(2)[::-1])))
    ),
    "rows of q, k, v in another order": Wrong(weights=_each("linear_qkv.weight", _turn)),
}
"""Effect of a wrong flag or checkpoint on a model -> how it is made here."""


def build(
    spec: ModelSpec,
    folder: Path,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype = torch.float32,
    wrong: Wrong = Wrong(),
    te: bool = False,
    fp8_recipe: str | None = None,
) -> list[GPTModel]:
    """This rank's chunk, loaded, frozen and with packed attention.

    Args:
        te: with Transformer Engine's linears and norms.
        fp8_recipe: of their FP8; None turns it off.
    """
    config = transformer_config(spec, layout, dtype=dtype, recompute="none")
    config.deallocate_pipeline_outputs = False
    for name, value in wrong.config.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    if fp8_recipe is not None:
        config.fp8, config.fp8_recipe = "hybrid", fp8_recipe
    if isinstance(config.no_rope_freq, int):
        every = config.no_rope_freq
        config.no_rope_freq = [int((i + 1) % every == 0) for i in range(spec.num_layers)]
    block = _te_block if te else _local_block
    arguments: dict[str, Any] = {
        "rotary_base": int(spec.rope_theta),
        "rope_scaling": spec.rope_scaling is not None,
        "rope_scaling_factor": (spec.rope_scaling or {"factor": 8.0})["factor"],
    }
    model = GPTModel(
        config, block(config, spec, wrong), vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied_embeddings, position_embedding_type="rope",
        **(arguments | dict(wrong.model)),
    )  # fmt: skip
    if dtype != torch.float32:
        model.to(dtype)
    load_backbone(_LocalNames(model) if te else model, spec, folder, layout)  # type: ignore[arg-type]
    with torch.no_grad():
        wrong.weights(dict(model.named_parameters()))
    freeze([model])
    install_packed_attention([model])
    return [model]


def _local_block(config: Any, spec: ModelSpec, wrong: Wrong) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        qk_layernorm=spec.qk_norm, normalization="RMSNorm", qk_l2_norm=wrong.qk_l2_norm
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.context_parallel_size > 1:
        parts.self_attention.submodules.core_attention = PackedCoreAttention
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _te_block(config: Any, spec: ModelSpec, wrong: Wrong) -> TransformerBlockSubmodules:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=spec.qk_norm, qk_l2_norm=wrong.qk_l2_norm
    )
    layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    layers = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


class _LocalNames:
    """A model of Transformer Engine's specification under the names of the local one."""

    def __init__(self, model: GPTModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            yield local_name(name), weight


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
