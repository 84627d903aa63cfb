"""Block-diagonal adapters: their rules, parts and counts, the products against dense factors, and
PEFT's format in both directions."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import BdLoraConfig, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers.block_case import against_dense, blocks, dense_factors
from tests.helpers.layout_sites import SPEC as SMALL
from tests.helpers.layout_sites import join_shards, sites_of_ranks
from tests.helpers.linear_case import Case
from tests.helpers.planner_case import HARDWARE, memory_use
from tests.helpers.tiny_models import make_tiny_model, random_factors
from tests.unit.training.formats.test_peft_format import merged_logits, peft_logits
from tlora_megatron.config.job import HF_TARGETS, ROW_PARALLEL_TARGETS, DataSpec, JobSpec, LoraSpec
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.rules import check_job
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import (
    BlackBoxMixin,
    attach,
    check_blocks_fit,
    make_multi_adapter,
)
from tlora_megatron.layers.sites import make_site
from tlora_megatron.layers.slab import factor_shape, initial_factor
from tlora_megatron.layers.slab_layout import slab_layout
from tlora_megatron.model.backbone import LinearShape, LinearsSpec, check_block_sizes
from tlora_megatron.model.config_json import read_model_spec
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan, job_misfit
from tlora_megatron.planner.cost.adapter_sizes import adapter_elements
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.training.formats.peft import export_adapter, load_adapter
from tlora_megatron.training.run.preparation import fit_to_job

CPU = torch.device("cpu")
SPEC = dataclasses.replace(SMALL, hidden_size=32, ffn_size=48)
"""Widths that 8 blocks divide."""


class TestRules:
    @pytest.mark.parametrize(
        ("lora", "message"),
        [
            (
                blocks(10, 4),
                r"x.lora.rank must be a multiple of num_blocks = 4, got 10; the nearest are 8 or "
                r"12, or num_blocks 2 or 5",
            ),
            (blocks(3, 4), r"got 3; the nearest are 4, or num_blocks 3"),
            (blocks(8, 1), r"x.lora.num_blocks must be at least 2 .* got 1"),
            (
                LoraSpec(num_blocks=2),
                r"x.lora.num_blocks must be 1 with parametrization standard, got",
            ),
            (
                blocks(8, 2, target_modules=("linear_qkv",)),
                r"must name single modules .* got linear_qkv; name q_proj, k_proj and v_proj",
            ),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, lora: LoraSpec, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_job(JobSpec(name="a", data=DataSpec(train="a"), lora=lora, max_steps=1), "x")

    @pytest.mark.parametrize(
        ("lora", "tp_size", "message"),
        [
            (
                blocks(24, 6),
                4,
                r"num_blocks of job 'a' must be a multiple of tp_size = 4, got 6; the nearest for "
                r"rank 24 are 4 or 8",
            ),
            (
                blocks(12, 12),
                1,
                r"must divide the 32 outputs of q_proj, got 12; the nearest for rank 12 are 4",
            ),
            (
                blocks(15, 3),
                2,
                r"multiple of tp_size = 2, got 3; no number does for rank 15, the nearest ranks "
                r"are 14 or 16",
            ),
            (blocks(10, 4), 2, r"must be at least 2 and divide lora.rank, got 4; .* are 2"),
            (
                blocks(12, 12, target_modules=("o_proj",)),
                1,
                r"must divide the 32 inputs of o_proj, got 12",
            ),
        ],
    )
    def test_blocks_fit_ranks_and_sizes(self, lora: LoraSpec, tp_size: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check_block_sizes("a", lora, SPEC, tp_size)
        check_block_sizes("a", blocks(16, 8), SPEC, 4)
        check_block_sizes("a", LoraSpec(rank=7), SPEC, 3)

    def test_other_models_linears_need_a_known_cut(self) -> None:
        shapes = {"q_proj": "column", "o_proj": "column", "c_fc": "column"}
        linears = tuple(
            LinearShape(target=t, path=f"h.{{}}.{t}", out_size=8, in_size=8, kind=kind)
            for t, kind in shapes.items()
        )
        spec = LinearsSpec(num_layers=1, vocab_size=8, max_positions=8, linears=linears)
        check_block_sizes("a", blocks(4, 2, target_modules=("q_proj", "o_proj")), spec)
        with pytest.raises(ValueError, match=r"must be among .* got c_fc: how tensor parallelism"):
            check_block_sizes("a", blocks(4, 2, target_modules=("c_fc",)), spec)
        with pytest.raises(ValueError, match="must be standard on o_proj, which is cut as column"):
            check_block_sizes("a", blocks(4, 2, target_modules=("o_proj",)), spec, 2)


class TestSlab:
    @pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (4, 1), (2, 2)])
    @pytest.mark.parametrize("num_blocks", [4, 8])
    def test_shards_join_to_the_whole_and_nothing_is_replicated(
        self, num_blocks: int, tp_size: int, pp_size: int
    ) -> None:
        lora = blocks(16, num_blocks)
        factors = random_factors(SPEC, lora)
        layouts = [slab_layout(sites, lora) for sites in sites_of_ranks(SPEC, tp_size, pp_size)]
        join_shards(layouts, factors, SPEC)
        assert {layout.replicated_numel for layout in layouts} == {0}
        total = sum(factor.numel() for factor in factors.values())
        assert [layout.numel for layout in layouts] == [total // len(layouts)] * len(layouts)

    @pytest.mark.parametrize("target", HF_TARGETS)
    def test_parameters_are_as_many_as_the_paper_says(self, target: str) -> None:
        lora = blocks(16, 4, target_modules=(target,))
        out_size, in_size = SPEC.target_shape(target)
        expected = 16 * (in_size + out_size // 4)
        if target in ROW_PARALLEL_TARGETS:
            expected = 16 * (in_size // 4 + out_size)
        assert slab_layout(sites_of_ranks(SPEC, 1)[0], lora).numel == 4 * expected
        shapes = [factor_shape(SPEC, f"layers.0.{target}.lora_{side}", lora) for side in "ab"]
        assert sum(math.prod(shape) for shape in shapes) == expected
        for tp_size in (1, 2, 4):
            held = slab_layout(sites_of_ranks(SPEC, tp_size)[0], lora).numel
            load = JobLoad.from_spec(
                JobSpec(name="a", data=DataSpec(train="a"), lora=lora), LengthHistogram.single(8)
            )
            assert held == 4 * expected // tp_size == 4 * adapter_elements(SPEC, load, tp_size)
            assert adapter_elements(SPEC, load, tp_size, replicated_only=True) == 0

    def test_the_planner_keeps_to_tp_sizes_that_divide_the_blocks(self) -> None:
        load = JobLoad(
            name="a", rank=16, num_blocks=4, batch_size=1, lengths=LengthHistogram.single(8)
        )
        assert job_misfit([load], Plan(tp_size=4)) is None
        reason = job_misfit([load], Plan(tp_size=8))
        assert reason == "num_blocks 4 of job a is no multiple of TP 8"


LORAS = (
    blocks(8, 4, alpha=5, dropout=0.2),
    LoraSpec(rank=5, alpha=3, dropout=0.1),
    blocks(6, 2, alpha=9, use_rslora=True),
)


@pytest.mark.parametrize("linear", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
@pytest.mark.parametrize("training", [False, True])
def test_the_linear_equals_that_of_dense_factors(linear: str, training: bool) -> None:
    """Outputs and every gradient, of a micro-batch shared with a standard job, to the bit."""
    pairs = against_dense(linear, LORAS, (9, 17, 5), spec=SPEC, training=training)
    for name, (got, expected) in pairs.items():
        assert expected.any(), name
        assert torch.equal(got, expected), name


def test_linears_that_reduce_by_themselves_are_refused_over_tp() -> None:
    """Transformer Engine's: a block-diagonal branch is part of the partial sums."""
    for tp_size in (1, 2):
        site = make_site(SPEC, 0, "linear_proj", 0, tp_size)
        bank = AdapterBank([site], LORAS, dtype=torch.float32, device=CPU)
        module = torch.nn.Linear(site.in_size, site.out_size)
        if tp_size == 1:
            attach([(site, module)], bank)
            continue
        with pytest.raises(ValueError, match="must be standard with tp_size above 1 around a Lin"):
            attach([(site, module)], bank)
        assert type(module) is torch.nn.Linear
        with pytest.raises(ValueError, match="of job 'a' must be standard with tp_size above 1"):
            check_blocks_fit("a", blocks(8, 4), [(site, module)])
        for fine in (blocks(8, 4, target_modules=("q_proj",)), LoraSpec()):
            check_blocks_fit("a", fine, [(site, module)])
        make_multi_adapter(module, BlackBoxMixin)
        with pytest.raises(ValueError, match="of job 'a' must be standard with tp_size above 1"):
            check_blocks_fit("a", blocks(8, 4), [(site, module)])


def test_gradients_of_a_forgotten_batch_do_not_come_back() -> None:
    case = Case("linear_qkv", torch.float32, spec=SPEC, loras=LORAS)
    view = case.view((9, 17, 5), num_tokens=40, training=False)
    case.run(case.draw(40, 1, 32), case.draw(40, 1, case.site.out_size), view)
    for adapter in case.bank.adapters:
        adapter.slab.zero_grad()
        adapter.slab.collect_grad()
        assert not adapter.slab.grad.any()


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(base_dir: Path) -> ModelSpec:
    return read_model_spec(base_dir / "config.json")


class TestPeft:
    @pytest.mark.parametrize(
        "lora",
        [
            blocks(8, 4, alpha=9.5),
            blocks(6, 2, alpha=8.0, use_rslora=True, target_modules=("v_proj", "down_proj")),
            blocks(4, 4, alpha=4.0, target_modules=("o_proj", "linear_fc2")),
        ],
        ids=["all", "rslora", "megatron names"],
    )
    def test_peft_computes_what_we_trained(
        self, base_dir: Path, model: ModelSpec, tmp_path: Path, lora: LoraSpec
    ) -> None:
        factors = random_factors(model, lora, seed=1)
        export_adapter(tmp_path / "a", lora=lora, factors=factors, model=model, base_model="tiny")
        named = {name.replace("linear_fc2", "down_proj"): f for name, f in factors.items()}
        dense_lora, dense = dense_factors(lora, named)
        tokens = torch.arange(3, 27).reshape(2, 12)
        ours = merged_logits(base_dir, dense_lora, dense, tokens)
        theirs = peft_logits(base_dir, tmp_path / "a", tokens)
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
        assert (merged_logits(base_dir, lora, {}, tokens) - ours).abs().max() > 0.1

    def test_peft_s_files_are_read(self, base_dir: Path, model: ModelSpec, tmp_path: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        config = LoraConfig(
            r=8,
            lora_alpha=12,
            target_modules=["q_proj", "o_proj"],
            use_bdlora=BdLoraConfig(
                target_modules_bd_a=["self_attn.o_proj"], target_modules_bd_b=["q_"], nblocks=4
            ),
        )
        peft = get_peft_model(base, config)
        peft.save_pretrained(tmp_path / "peft")
        adapter = load_adapter(tmp_path / "peft", model=model)
        assert adapter.lora == blocks(8, 4, alpha=12, target_modules=("q_proj", "o_proj"))
        module = peft.get_submodule("base_model.model.model.layers.1.self_attn.o_proj")
        held = module.lora_A["default"].weight.detach()
        assert torch.equal(adapter.factors["layers.1.o_proj.lora_a"], held)
        # Fresh factors follow the same law as PEFT's.
        drawn = initial_factor(model, "layers.1.o_proj.lora_a", adapter.lora, 0)
        bound = math.sqrt(6 / held.shape[1])
        for values in (held, drawn):
            assert 0.8 * bound < values.abs().max() <= bound
        job = JobSpec(name="a", data=DataSpec(train="a"), lora=adapter.lora)
        assert fit_to_job(adapter, job).keys() == adapter.factors.keys()
        standard = dataclasses.replace(
            job, lora=dataclasses.replace(job.lora, parametrization="standard", num_blocks=1)
        )
        with pytest.raises(ValueError, match=r"num_blocks must be the job's 1, got 4"):
            fit_to_job(adapter, standard)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"target_modules_bd_b": []}, "must make lora_b of .*q_proj .* got neither factor"),
            (
                {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["o_proj"]},
                "must make lora_b of .*q_proj .* got lora_a",
            ),
            ({"nblocks": 3}, "r must be a multiple of use_bdlora.nblocks = 3, got 8"),
            ({"nblocks": "4"}, "use_bdlora.nblocks must be a whole number"),
            ({"blocks": 4}, "use_bdlora must be an object of"),
            ({"target_modules_bd_a": "o_proj"}, "target_modules_bd_a must be a list of names"),
            ({"match_strict": 1}, "use_bdlora.match_strict must be true or false, got 1"),
            ({"match_strict": "no"}, "use_bdlora.match_strict must be true or false, got 'no'"),
            ({"match_strict": None}, "use_bdlora.match_strict must be true or false, got None"),
        ],
    )
    def test_other_block_structures_are_refused(
        self, model: ModelSpec, tmp_path: Path, fields: dict[str, Any], message: str
    ) -> None:
        lora = blocks(8, 4, target_modules=("q_proj", "o_proj"))
        factors = random_factors(model, lora)
        folder = tmp_path / "a"
        export_adapter(folder, lora=lora, factors=factors, model=model, base_model="tiny")
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        assert config["use_bdlora"] == {
            "target_modules_bd_a": ["o_proj"],
            "target_modules_bd_b": ["q_proj"],
            "nblocks": 4,
            "match_strict": True,
        }
        config["use_bdlora"] |= fields
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=message):
            load_adapter(folder, model=model)

    def test_one_block_is_a_standard_adapter(self, model: ModelSpec, tmp_path: Path) -> None:
        lora = LoraSpec(rank=8, target_modules=("q_proj",))
        folder = tmp_path / "a"
        factors = random_factors(model, lora)
        export_adapter(folder, lora=lora, factors=factors, model=model, base_model="tiny")
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"use_bdlora": {"nblocks": 1}}))
        assert load_adapter(folder, model=model).lora == lora


def test_the_planner_counts_what_a_gathered_input_takes() -> None:
    """Under sequence parallelism a linear of block-diagonal jobs keeps all rows of its input."""
    base = JobLoad(name="a", rank=16, batch_size=64, lengths=LengthHistogram.single(8))
    plan = Plan(tp_size=2, sequence_parallel=True, micro_batch_tokens=512)
    standard = memory_use(SPEC, [base], plan, HARDWARE, 512)
    cut = memory_use(SPEC, [dataclasses.replace(base, num_blocks=2)], plan, HARDWARE, 512)
    size = 2 if HARDWARE.dtype == "bfloat16" else 4
    # linear_qkv and linear_fc1 of four layers; s takes a chunk of 16 for ranks 16 and 8 alike.
    assert cut.activations - standard.activations == 4 * 512 * 2 * SPEC.hidden_size / 2 * size
    states = 12 * 4 * sum(
        16 * (i + o / 2) / 2 if t not in ROW_PARALLEL_TARGETS else 16 * (i / 2 + o) / 2
        for t in HF_TARGETS
        for o, i in [SPEC.target_shape(t)]
    )  # fmt: skip
    assert cut.adapter_states == states
    assert cut.adapter_gradients == states / 3
    spread = memory_use(SPEC, [dataclasses.replace(base, num_blocks=4)], plan, HARDWARE, 512)
    assert spread.adapter_gradients > cut.adapter_gradients / 2
