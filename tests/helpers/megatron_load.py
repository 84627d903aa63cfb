"""Worker: Megatron loads converted checkpoints, and its logits are Hugging Face's.

`megatron_load.py core FOLDER LAYOUT...` builds `GPTModel`s of the installed megatron-core and loads
with its `dist_checkpointing`; LAYOUT is `tp=2` or `pp=2`. Every folder in FOLDER holds a Hugging
Face model, its conversion `megatron` and a `reference.pt` of token ids and logits.

As the script of `megatron_lm_cpu.py`, `megatron_load.py trainer FOLDER MODEL ARGS...` parses ARGS
with Megatron-LM's own parser and loads with its own `load_checkpoint`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from tests.helpers.variants import end_world
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.training.formats.megatron_flags import megatron_arguments


def main() -> None:
    mode, root, *rest = sys.argv[1:]
    if mode == "core":
        for layout in rest:
            _check_with_core(Path(root), **{k: int(v) for k, v in [layout.split("=")]})
    else:
        _check_with_trainer(Path(root) / rest[0], rest[1:])
    end_world("all equal")


def _check_with_core(root: Path, *, tp: int = 1, pp: int = 1) -> None:
    from tlora_megatron.integrations.megatron.model import transformer_config
    from tlora_megatron.integrations.megatron.process_groups import initialize_parallel
    from tlora_megatron.model.layout import ParallelLayout

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelLayout(tp_size=tp, pp_size=pp).for_world(world_size)
    initialize_parallel(layout)
    if not torch.cuda.is_available():
        # Tied weights of two pipeline stages are moved there to be made equal.
        from tlora_megatron.integrations.megatron_lm.cpu import CudaIsCpu

        CudaIsCpu().__enter__()
    for directory in sorted(root.iterdir()):
        spec = read_model_spec(directory / "config.json")
        config = transformer_config(spec, layout, dtype=torch.float32, recompute="none")
        config = _with_experts(config, spec)
        model = _build(config, spec)
        groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state, missing, unexpected = dist_checkpointing.load(
            {"model": model.sharded_state_dict(metadata=groups)},
            str(directory / "megatron" / "release"),
            strict="return_all",
        )
        assert not unexpected, unexpected
        # Transformer Engine's spec asks for them.
        norms = ("layernorm._extra_state", "pre_mlp_layernorm.weight")
        assert all(key.endswith(norms) for key in missing), missing
        model.load_state_dict(state["model"], strict=True)
        _check_logits(model, directory)


def _with_experts(config: Any, spec: ModelSpec) -> Any:
    if spec.experts is None:
        return config
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine core 0.16.1 asks for a name that it did not import.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # type: ignore[attr-defined]
    named = megatron_arguments(spec)
    values = {name: value for name, value in named.items() if name.startswith("moe_")}
    return replace(config, num_moe_experts=spec.experts.num_experts, **values)


def _check_with_trainer(directory: Path, arguments: list[str]) -> None:
    from megatron.training import get_args, initialize_megatron
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.checkpointing import load_checkpoint

    sys.argv = [sys.argv[0], *arguments]
    _initialize(initialize_megatron)
    args = get_args()
    spec = read_model_spec(directory / "config.json")
    for name, value in megatron_arguments(spec).items():
        if name != "disable_bias_linear":
            assert getattr(args, name) == value, f"{name}: {getattr(args, name)} is not {value}"
    assert not args.add_bias_linear
    model = _build(core_transformer_config_from_args(args), spec)
    assert load_checkpoint([model], None, None, strict=True) == (0, 0)
    _check_logits(model, directory)


def _initialize(initialize_megatron: Any) -> None:
    """Parses and initializes as `pretrain_gpt.py` does; from core 0.18 on these are two calls."""
    from megatron.training import arguments, initialize

    parse = getattr(arguments, "parse_and_validate_args", None)
    if parse is None:
        initialize_megatron(allow_no_cuda=True)
        return
    parse()
    initialize.initialize_megatron(allow_no_cuda=True)


def _build(config: Any, spec: ModelSpec) -> GPTModel:
    arguments = megatron_arguments(spec)
    config.deallocate_pipeline_outputs = False
    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=None if spec.experts is None else spec.experts.num_experts,
            qk_layernorm=spec.qk_norm,
            normalization="RMSNorm",
        ),
        vocab_size=arguments["padded_vocab_size"],
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=arguments["rotary_base"],
        rope_scaling=arguments["use_rope_scaling"],
        rope_scaling_factor=arguments.get("rope_scaling_factor", 8.0),
    )


def _check_logits(model: GPTModel, directory: Path) -> None:
    stored = torch.load(directory / "reference.pt", weights_only=True)
    ids, expected = stored["ids"], stored["logits"]
    future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    found: list[Tensor] = []

    def forward_step(_: Iterator[Any], model: GPTModel) -> tuple[Tensor, Any]:
        output = model(ids, torch.arange(ids.shape[1])[None], future)

        def keep(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            found.append(logits.detach().clone())
            return logits.sum(), torch.tensor(1), {}

        return output, keep

    model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter([None]), model=[model],
            num_microbatches=1, seq_length=ids.shape[1], micro_batch_size=1, forward_only=True,
        )  # fmt: skip
    if not parallel_state.is_pipeline_last_stage():
        return
    (logits,) = found
    width, begin = logits.shape[-1], parallel_state.get_tensor_model_parallel_rank()
    expected = expected[..., begin * width : (begin + 1) * width]
    error = (
        (logits[..., : expected.shape[-1]] - expected).abs().max() / expected.abs().max()
    ).item()
    assert error < 1e-5, f"{directory.name}: relative error {error}"


if __name__ == "__main__":
    main()
