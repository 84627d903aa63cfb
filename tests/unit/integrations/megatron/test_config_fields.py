"""A field that changes a model is computed or refused: of config.json, and of Megatron's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.built_model import run_documents_alone, run_packed
from tests.helpers.tiny_models import (
    TINY_EXPERT_TYPES,
    TINY_MODEL_TYPES,
    TinyModelType,
    make_tiny_model,
)
from tests.helpers.user_models import SPEC, build_user_gpt, user_config
from tlora_megatron.integrations.megatron.built.model import (
    discover,
    freeze,
    install_packed_attention,
)
from tlora_megatron.integrations.megatron.built.own_compute import use_own_compute
from tlora_megatron.integrations.megatron.model import build_backbone, load_backbone
from tlora_megatron.integrations.megatron_lm.guard import RULES
from tlora_megatron.integrations.megatron_lm.same_model import NO_EFFECT
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.routing import Document, pack_micro_batch, use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD = {"rope_parameters": None, "rope_theta": 50.0}
WINDOW = {"sliding_window": 5, "use_sliding_window": True}
CHANGES: tuple[dict[str, Any], ...] = (
    {"hidden_act": "gelu"}, {"rms_norm_eps": 0.1}, {"rms_norm_eps": None},
    {"rope_parameters": None}, OLD,
    {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"rope_parameters": {"rope_theta": 77.0}, "rope_scaling": LLAMA3},
    {"rope_parameters": {**LLAMA3, "rope_theta": 77.0}, "original_max_position_embeddings": 16},
    {**OLD, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {**OLD, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"partial_rotary_factor": 0.5}, {"attention_bias": True}, {"mlp_bias": True},
    {"qkv_bias": False}, {"is_causal": False}, {"tie_word_embeddings": True},
    {**WINDOW, "max_window_layers": 2},
    {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"num_hidden_layers": 3}, {"norm_topk_prob": True}, {"norm_topk_prob": False},
    {"norm_topk_prob": None}, {"num_experts_per_tok": 1}, {"mlp_only_layers": [0]},
    {"decoder_sparse_step": 2}, {"swiglu_limit": 3.0},
    *({name: 0.3} for name in ("attention_dropout", "logit_scale", "embedding_multiplier")),
    *({name: 0.3} for name in ("residual_multiplier", "final_logit_softcapping", "clip_qkv")),
)  # fmt: skip
"""Fields of config.json with other values; None takes one out."""


def our_logits(directory: Path, ids: Tensor) -> Tensor:
    """Logits of a document, as far as the base's window allows one."""
    spec, layout = read_model_spec(directory / "config.json"), ParallelLayout()
    ids = ids[: spec.sliding_window]
    model = build_backbone(spec, layout, dtype=torch.float32, recompute="none")
    load_backbone(model, spec, directory, layout)
    documents = [Document(slot=0, length=len(ids))]
    view = pack_micro_batch(documents, num_slots=1, num_tokens=len(ids))
    with use_micro_batch(view), torch.no_grad():
        return model(ids[None], None, None).squeeze(0)[..., : spec.vocab_size]


FIRST, *OTHERS = *TINY_MODEL_TYPES, *TINY_EXPERT_TYPES, "gpt_oss"


@pytest.mark.parametrize(
    "kind", [FIRST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]
)
def test_a_config_json_is_refused_or_means_what_transformers_makes_of_it(
    groups: ParallelGroups, tmp_path: Path, kind: TinyModelType
) -> None:
    directory = make_tiny_model(tmp_path, kind)
    config = directory / "config.json"
    raw, ids = json.loads(config.read_text()), torch.arange(24) * 5 % 128
    taken = 0
    for change in ({}, *CHANGES):
        values = {key: value for key, value in (raw | change).items() if value is not None}
        config.write_text(json.dumps(values))
        try:
            ours = our_logits(directory, ids)
        except ValueError:
            continue
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        except Exception:  # what transformers refuses, in many ways, has no meaning
            continue
        with torch.no_grad():
            theirs = model(ids[None]).logits[0, : len(ours)]
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error < 1e-5, f"{change} is off by {error}"
        taken += 1
    assert taken > 10


_GROUPS = (
    "how precisely it is computed",
    "losses and gradients of a base that trains",
    "what core models never read, or what attention here leaves out",
)
"""Of `NO_EFFECT`: what else stands there has no place in a forward of one process."""
_OTHERS: dict[str, Any] = {
    "activation_func": F.relu,
    "softmax_scale": 0.5,
    "no_rope_freq": 2,
    "activation_func_clamp_value": 0.5,
}
_UNFIT = ("bf16", "fp16", "*_dtype", "fp8*", "fp4*", "moe_*", "qk_clip*", "log_*", "mtp_*")
"""Fields of dtypes, layers and logs that the test's model does not have."""


def changed_fields() -> Iterator[tuple[str, Any]]:
    """Fields of Megatron's configuration, each with another value than the tiny model's.

    Not those that the guard refuses, but one that shows that the kernels are left.
    """
    refused = {rule.argument for rule in RULES} - {"rotary_interleaved"}
    elsewhere = [p for why, names in NO_EFFECT.items() if why not in _GROUPS for p in names]
    elsewhere += [*_UNFIT, *refused]
    usual = user_config()
    for field in dataclasses.fields(TransformerConfig):
        name, value = field.name, getattr(usual, field.name)
        if name in _OTHERS:
            yield name, _OTHERS[name]
        elif any(fnmatch(name, p) for p in elsewhere):
            continue
        elif isinstance(value, bool):
            yield name, not value
        elif isinstance(value, float):
            yield name, 2 * value + 0.25


COMPUTED = {"softmax_scale", "layernorm_epsilon", "rotary_interleaved", "qk_layernorm"}


@pytest.mark.parametrize(
    "names", [COMPUTED, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_built_model_is_refused_or_computes_what_it_did_untouched(
    names: set[str] | None, groups: ParallelGroups
) -> None:
    compared = set()
    for name, value in changed_fields():
        if names is not None and name not in names:
            continue
        try:
            untouched = run_documents_alone(build_user_gpt(**{name: value}))
            chunks = build_user_gpt(**{name: value})
            freeze(chunks)
            install_packed_attention(chunks)
            linears = discover(chunks, SPEC, groups)
        except Exception:  # Megatron's own refusals are of many kinds
            continue
        compute = use_own_compute(chunks, linears, groups, SPEC.vocab_size)
        packed = run_packed(chunks, groups, compute=compute)
        for got, expected in zip(packed, untouched, strict=True):
            used = got != 0
            torch.testing.assert_close(
                got[used],
                expected[used],
                rtol=1e-5,
                atol=1e-5,
                msg=lambda m: f"{name}: {m}",  # noqa: B023
            )
        compared.add(name)
    assert compared >= COMPUTED
