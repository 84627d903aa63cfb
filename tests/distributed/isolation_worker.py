"""Worker: holds models that a Megatron-LM script could build to isolation of documents.

`isolation_worker.py FOLDER CASE...`; a CASE is `KEY=VALUE,...` of tp, pp, vp, cp, sp, rope, ddp and
recompute as in `built_model_worker`, dtype, and leak: `conv` before self-attention, of which each
row sees the one before it, or `back`, whose gradients alone do that. Every rank writes what each
case was refused for, nothing if it was taken, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from tests.distributed import built_model_worker as built
from tests.helpers import user_models
from tests.helpers.variants import end_world, layout_of, options_of
from tlora_megatron.integrations.megatron.built.model import install_packed_attention
from tlora_megatron.integrations.megatron.built.own_compute import use_own_compute
from tlora_megatron.integrations.megatron_lm.engine import MegatronLmEngine
from tlora_megatron.integrations.megatron_lm.session import check_engine_isolation

SEQ_LENGTH = 96


class ConvolvedAttention(SelfAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = torch.cat([hidden_states[:1], hidden_states[:-1]])
        return super().forward(hidden_states + 1e-4 * before, *args, **kwargs)


class _LeaksBack(torch.autograd.Function):
    """The identity, whose gradients go to the row before as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        behind = torch.cat([gradient[1:], torch.zeros_like(gradient[:1])])
        return gradient + 1e-4 * behind


class BackwardsAttention(SelfAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(_LeaksBack.apply(hidden_states), *args, **kwargs)


LEAKS: dict[str, type[SelfAttention]] = {"conv": ConvolvedAttention, "back": BackwardsAttention}


def main() -> None:
    refused = {}
    for case in sys.argv[2:]:
        refused[case] = refusal(options_of(case))
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(refused))
    end_world()


def refusal(options: dict[str, str]) -> str:
    dtype = getattr(torch, options.get("dtype", "float32"))
    more = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16}
    given = user_models.get_gpt_layer_local_spec

    def leaking(**asked: Any) -> Any:
        layer = given(**asked)
        if "leak" in options:
            layer.submodules.self_attention.module = LEAKS[options["leak"]]
        return layer

    with patch.object(user_models, "get_gpt_layer_local_spec", leaking):
        chunks, groups, linears = built.build_frozen(options, layout_of(options), **more)
    install_packed_attention(chunks)
    spec, _ = built.adapted(options.get("rope", "plain"))
    compute = use_own_compute(chunks, linears, groups, spec.vocab_size)
    engine = MegatronLmEngine(
        chunks, groups, vocab_size=spec.vocab_size, seq_length=SEQ_LENGTH, compute=compute
    )
    try:
        check_engine_isolation(engine)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
