"""Discovery of a built model's linears, and what it refuses by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

from tests.helpers.user_models import EXPERTS_SPEC, MOE_SPEC, SPEC, build_user_gpt
from tlora_megatron.integrations.megatron.built.expert_layers import AdaptedExperts
from tlora_megatron.integrations.megatron.built.model import (
    discover,
    freeze,
    install_packed_attention,
    language_models,
    record_stages,
    require_whole_weights,
)
from tlora_megatron.integrations.megatron.layer.core_attention import PackedCoreAttention
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import DocumentRotaryEmbedding
from tlora_megatron.integrations.megatron.process_groups import current_groups
from tlora_megatron.layers.sites import check_targets
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import EXPERT_LINEARS, LINEAR_TARGETS
from tlora_megatron.parallel.groups import ParallelGroups

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the CPU")


class Wrapped(nn.Module):
    """Holds a model as Float16Module and DistributedDataParallel do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture
def chunk(groups: ParallelGroups) -> Any:
    return build_user_gpt()[0]


def test_linears_are_found_inside_wrappers_in_order(chunk: Any, groups: ParallelGroups) -> None:
    linears = discover([Wrapped(Wrapped(chunk))], SPEC, groups)
    expected = [(layer, linear) for layer in range(SPEC.num_layers) for linear in LINEAR_TARGETS]
    assert [(site.layer, site.linear) for site, _ in linears] == expected
    layer = chunk.decoder.layers[2]
    assert linears[8][1] is layer.self_attention.linear_qkv
    assert linears[11][1] is layer.mlp.linear_fc2


def test_a_target_that_some_layer_lacks_is_refused() -> None:
    attention = tuple((layer, "linear_qkv") for layer in range(SPEC.num_layers))
    layout = ParallelLayout(stage_linears=((*attention, (0, "linear_fc1")),))
    check_targets(SPEC, layout, "a", ("q_proj", "linear_qkv"))
    message = r"job 'a': lora.target_modules must name .*, got 'up_proj', which layer 1 lacks"
    with pytest.raises(ValueError, match=message):
        check_targets(SPEC, layout, "a", ("q_proj", "up_proj"))
    check_targets(SPEC, ParallelLayout(), "a", ("up_proj",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_dropout", 0.1),
        ("gated_linear_unit", False),
        ("mtp_num_layers", 1),
        ("moe_expert_capacity_factor", 1.0),
    ],
)
def test_settings_that_adapters_do_not_work_with_are_refused(
    chunk: Any, groups: ParallelGroups, field: str, value: Any
) -> None:
    setattr(chunk.config, field, value)
    with pytest.raises(ValueError, match=rf"{field} must be .*, got {value}"):
        discover([chunk], SPEC, groups)


def test_another_shape_than_the_spec_is_refused(chunk: Any, groups: ParallelGroups) -> None:
    with pytest.raises(ValueError, match=r"layers.0.linear_fc1 must have a weight of \[208, 64\]"):
        discover([chunk], replace(SPEC, ffn_size=104), groups)


def test_heads_that_tensor_parallelism_cuts_are_refused(chunk: Any, groups: ParallelGroups) -> None:
    wide = replace(groups, layout=ParallelLayout(tp_size=4))
    with pytest.raises(ValueError, match=r"num_query_groups must be a multiple of .*=4, got 2"):
        discover([chunk], SPEC, wide)


def test_unknown_modules_are_refused(chunk: Any, groups: ParallelGroups) -> None:
    layer = chunk.decoder.layers[1]
    kept, layer.mlp.linear_fc2 = layer.mlp.linear_fc2, nn.Linear(SPEC.ffn_size, SPEC.hidden_size)
    with pytest.raises(ValueError, match=r"layers.1.linear_fc2 must be one of .*, got Linear"):
        discover([chunk], SPEC, groups)
    layer.mlp.linear_fc2 = kept
    layer.self_attention = nn.Identity()
    with pytest.raises(ValueError, match=r"layer 1 must have SelfAttention, got Identity"):
        discover([chunk], SPEC, groups)
    chunk.decoder.layers[1] = nn.Identity()
    with pytest.raises(ValueError, match=r"decoder layers must be attention or MLP .* Identity"):
        discover([chunk], SPEC, groups)
    with pytest.raises(ValueError, match=r"must be a GPTModel or HybridModel .*, got Linear"):
        language_models([nn.Linear(2, 2)])


def test_an_mlp_that_calls_no_linears_is_refused(chunk: Any, groups: ParallelGroups) -> None:
    mlp = chunk.decoder.layers[1].mlp
    mlp.__class__ = type("TEFusedMLP", (type(mlp),), {})
    with pytest.raises(ValueError, match=r"layer 1 must have an MLP whose .*, got TEFusedMLP"):
        discover([chunk], SPEC, groups)


def test_weights_that_do_not_fit_are_refused_even_by_lenient_loaders(chunk: Any) -> None:
    require_whole_weights([Wrapped(chunk)])
    weights = {k: v for k, v in chunk.state_dict().items() if not k.endswith("_extra_state")}
    chunk.load_state_dict(weights, strict=False)
    norm = "decoder.final_layernorm.weight"
    lacking = {key: value for key, value in weights.items() if key != norm}
    with pytest.raises(ValueError, match=rf"got 1 missing \({norm}\) and 0 unexpected"):
        chunk.load_state_dict(lacking, strict=False)
    with pytest.raises(ValueError, match=r"0 missing \(\) and 1 unexpected \(bias\)"):
        chunk.load_state_dict(weights | {"bias": torch.zeros(1)}, strict=False)
    spoilt = weights[norm].clone()
    spoilt[1] = float("nan")
    with pytest.raises(ValueError, match=f"^{norm} of the checkpoint must be finite"):
        chunk.load_state_dict(weights | {norm: spoilt}, strict=False)


def test_of_experts_the_shared_one_is_found_if_the_spec_has_it(groups: ParallelGroups) -> None:
    (chunk,) = build_user_gpt("moe")
    attention = ["linear_qkv", "linear_proj"]
    found = discover([chunk], SPEC, groups)
    assert [site.linear for site, _ in found] == attention * SPEC.num_layers
    linears = discover([chunk], MOE_SPEC, groups)
    assert [s.linear for s, _ in linears] == [*attention, "shared_fc1", "shared_fc2"] * 4
    assert linears[2][1] is chunk.decoder.layers[0].mlp.shared_experts.linear_fc1
    assert len({site.index for site, _ in linears}) == len(linears)
    layout = record_stages(groups, linears).layout
    check_targets(MOE_SPEC, layout, "a", ("q_proj", "shared_expert.up_proj"))
    rule = r"job 'a': .* every layer has, got 'down_proj', which layer 0"
    with pytest.raises(ValueError, match=rule):
        check_targets(MOE_SPEC, layout, "a", ("q_proj", "down_proj"))


def test_routed_experts_are_found_where_jobs_adapt_them(groups: ParallelGroups) -> None:
    (chunk,) = build_user_gpt("moe")
    linears = discover([chunk], EXPERTS_SPEC, groups)
    assert not any(site.linear in EXPERT_LINEARS for site, _ in linears)
    layer = chunk.decoder.layers[1].mlp
    assert not isinstance(layer.experts, AdaptedExperts)
    layout = record_stages(groups, linears).layout
    with pytest.raises(ValueError, match=r"got 'experts.down_proj', which layer 0 lacks"):
        check_targets(EXPERTS_SPEC, layout, "a", ("experts.down_proj",))

    groups = current_groups(ParallelLayout(), with_experts=True)
    found = discover([chunk], EXPERTS_SPEC, groups)
    assert [site.index for site, _ in found[: len(linears)]] == [s.index for s, _ in linears]
    of_experts = found[len(linears) :]
    assert [site.linear for site, _ in of_experts] == [*EXPERT_LINEARS] * 4
    assert of_experts[2][1] is layer.experts
    assert isinstance(layer.experts, AdaptedExperts)
    assert isinstance(layer.experts, SequentialMLP)
    layout = record_stages(groups, found).layout
    check_targets(EXPERTS_SPEC, layout, "a", ("experts.down_proj",))
    wrong = replace(EXPERTS_SPEC, ffn_size=24)
    with pytest.raises(ValueError, match=r"layers.0.experts_fc1 must have a weight of \[48, 64\]"):
        discover([chunk], wrong, groups)
    layer.experts.__class__ = type("GroupedMLP", (nn.Module,), {})
    with pytest.raises(ValueError, match=r"layer 1 must have experts of TEGr.*, got GroupedMLP"):
        discover([chunk], EXPERTS_SPEC, groups)


def test_without_a_shared_expert_its_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shared_expert.up_proj must be in the model, which has"):
        SPEC.target_shape("shared_expert.up_proj")


@pytest.mark.parametrize("pattern", ["*-*-*-", "M-*-", "**--", "*-*"])
def test_hybrid_patterns(chunk: Any, groups: ParallelGroups, pattern: str) -> None:
    chunk.hybrid_layer_pattern = pattern
    if pattern != "*-*-*-":
        with pytest.raises(ValueError, match=r"hybrid_layer_pattern must repeat .*, got "):
            discover([chunk], SPEC, groups)
    else:
        found = discover([chunk], SPEC, groups)
        assert {site.layer for site, _ in found} == {0, 1}


def test_packed_attention_is_installed_once(chunk: Any, groups: ParallelGroups) -> None:
    install_packed_attention([chunk])
    cores = [layer.self_attention.core_attention for layer in chunk.decoder.layers]
    assert all(isinstance(core, PackedCoreAttention) for core in cores)
    kind = type(chunk.rotary_pos_emb)
    assert issubclass(kind, DocumentRotaryEmbedding)
    install_packed_attention([chunk])
    assert [layer.self_attention.core_attention for layer in chunk.decoder.layers] == cores
    assert type(chunk.rotary_pos_emb) is kind


def test_outside_a_micro_batch_positions_are_as_before(chunk: Any, groups: ParallelGroups) -> None:
    before = chunk.rotary_pos_emb(9)
    install_packed_attention([chunk])
    assert torch.equal(chunk.rotary_pos_emb(9), before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("attention_dropout", 0.1), ("window_size", (4, 0)), ("qk_clip", True)],
        *[("position_embedding_type", kind) for kind in ("learned_absolute", "mrope")],
    ],
)
def test_attention_that_packing_does_not_compute_is_refused(
    chunk: Any, field: str, value: Any
) -> None:
    for owner in (chunk, chunk.config):
        setattr(owner, field, value)
    with pytest.raises(ValueError, match=rf"{field} must be .*, got {re.escape(repr(value))}"):
        install_packed_attention([chunk])


def test_freezing_leaves_a_graph(chunk: Any, groups: ParallelGroups) -> None:
    freeze([chunk])
    assert not any(p.requires_grad for p in chunk.parameters())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert chunk.embedding(tokens, None).requires_grad
    with torch.no_grad():
        assert not chunk.embedding(tokens, None).requires_grad


def test_freezing_turns_off_overlaps_with_gradients_of_weights(chunk: Any) -> None:
    """They would leave gradients of inputs unsummed; the others stay."""
    linear = chunk.decoder.layers[0].mlp.linear_fc1
    linear.ub_bulk_wgrad = linear.ub_bulk_dgrad = linear.ub_overlap_ag_fprop = True
    freeze([chunk])
    assert not linear.ub_bulk_wgrad
    assert not linear.ub_bulk_dgrad
    assert linear.ub_overlap_ag_fprop
    assert not hasattr(chunk.decoder.layers[0].mlp.linear_fc2, "ub_bulk_wgrad")
