"""LoRA shardings: what is held where, which values are exchanged, what is chosen, what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.layout_sites import join_shards
from tests.helpers.planner_case import FREE_LORA, HARDWARE, job, memory_use, step_cost
from tests.helpers.planner_case import SPEC as PLANNED
from tests.helpers.tiny_models import random_factors
from tests.helpers.user_models import SPEC
from tlora_megatron.config.job import HF_TARGETS, LoraSpec
from tlora_megatron.config.load import ignored_settings, load_config
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import make_site, stage_sites
from tlora_megatron.layers.slab_layout import slab_layout
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.planner.candidate import SHARDINGS, Plan, misfit
from tlora_megatron.planner.choices import (
    choose_lora_sharding,
    sharding_options,
    sharding_times,
)
from tlora_megatron.planner.cost.adapter_sizes import adapter_elements
from tlora_megatron.runtime.planning.plan_files import apply_plan, overrides_of

CPU = torch.device("cpu")
TIMES: dict[LoraSharding, float] = {"fold": 1.0, "rank_exchange": 1.2, "s_lora": 0.9}


def choose(asked: Any = "auto", **changes: Any) -> Any:
    given_: dict[str, Any] = {
        "tp_sizes": {2}, "black_box": None, "overlaps": False, "times_s": TIMES,
        "source": "by hand",
    }  # fmt: skip
    return choose_lora_sharding(asked, **(given_ | changes))


def test_auto_takes_what_is_fastest_and_tells_all_times() -> None:
    found = choose()
    assert found.sharding == "s_lora"
    assert found.line == (
        "parallel.lora_sharding: s_lora (auto: a round is to take fold 1000 ms, "
        "rank_exchange 1200 ms, s_lora 900 ms, by hand)"
    )


@pytest.mark.parametrize(
    ("asked", "changes", "sharding", "reason"),
    [
        ("auto", {"times_s": {**TIMES, "s_lora": 0.99}}, "fold", "0.99"),
        ("auto", {"times_s": {}, "source": "no profile"}, "fold", "no profile"),
        ("auto", {"overlaps": True}, "fold", "nano-batches"),
        ("auto", {"black_box": "TELinear"}, "rank_exchange", "TELinear"),
        ("rank_exchange", {"black_box": "TELinear"}, "rank_exchange", "TELinear"),
        ("rank_exchange", {}, "rank_exchange", "asked for"),
        ("s_lora", {"overlaps": True}, "s_lora", "asked for"),
        ("s_lora", {"tp_sizes": {1}}, "fold", "TP 1"),
        ("auto", {"tp_sizes": {2, 1}}, "fold", "replicas differ in tp_size"),
    ],
)
def test_other_choices(asked: str, changes: dict[str, Any], sharding: str, reason: str) -> None:
    found = choose(asked, **changes)
    assert found.sharding == sharding
    assert reason.replace("0.99", "990 ms") in found.reason


@pytest.mark.parametrize("asked", ["fold", "s_lora"])
def test_black_boxes_allow_rank_exchange_only(asked: str) -> None:
    rule = rf"lora_sharding must be rank_exchange or auto around a TELinear, .* got {asked}"
    with pytest.raises(ValueError, match=rule):
        choose(asked, black_box="TELinear")


@pytest.mark.parametrize(
    ("asked", "black_box", "got"), [("s_lora", None, "s_lora"), ("auto", "TELinear", "a TELinear")]
)
def test_unlike_tp_sizes_allow_fold_only(asked: str, black_box: str | None, got: str) -> None:
    with pytest.raises(ValueError, match=f"fold or auto where replicas differ .*, got {got}"):
        choose(asked, black_box=black_box, tp_sizes={2, 1})


def test_it_has_no_effect_without_tensor_parallelism(tmp_path: Path) -> None:
    repo, key = Path(__file__).parents[3], "parallel.lora_sharding=s_lora"
    quickstart = repo / "configs" / "quickstart.yaml"
    config = load_config(quickstart, [key, "parallel.tp_size=1"], str(tmp_path / "out"))
    assert "parallel.lora_sharding has no effect with tp_size 1" in ignored_settings(config)


def test_a_foreign_linear_cannot_be_entered() -> None:
    site = make_site(SPEC, 0, "linear_proj", 0, 2, "s_lora")
    bank = AdapterBank([site], [LoraSpec()], dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match=r"rank_exchange or auto around a Linear, .* got s_lora"):
        attach([(site, torch.nn.Linear(4, 4))], bank)


@pytest.mark.parametrize("rank", [1, 3, 6, 16])
@pytest.mark.parametrize("targets", [HF_TARGETS, ("linear_qkv", "o_proj", "linear_fc1")])
def test_s_lora_holds_every_element_once(rank: int, targets: tuple[str, ...]) -> None:
    lora = LoraSpec(rank=rank, target_modules=targets)
    factors = random_factors(SPEC, lora)
    layout = ParallelLayout(tp_size=2, lora_sharding="s_lora")
    sites = [stage_sites(SPEC, layout, tp_rank=rank, pp_rank=0) for rank in range(2)]
    slabs = join_shards([slab_layout(held, lora) for held in sites], factors, SPEC)
    assert all(slab.layout.replicated_numel == 0 for slab in slabs)
    total, held = sum(f.numel() for f in factors.values()), sum(s.layout.numel for s in slabs)
    if rank % 2:  # the last rank's part is filled up with zeros
        assert held > total
        assert sum(int((s.master == 0).sum()) for s in slabs) == held - total
    else:
        assert held == total


def test_no_replicas_mean_less_memory_and_no_sum_over_tp() -> None:
    jobs = [job(rank=64), job(name="b", rank=6)]
    fold, s_lora = (
        Plan(tp_size=2, micro_batch_tokens=512, lora_sharding=name) for name in ("fold", "s_lora")
    )
    for one in jobs:
        elements = [adapter_elements(PLANNED, one, 2, name) for name in ("fold", "s_lora")]
        replicated = adapter_elements(PLANNED, one, 2, replicated_only=True)
        assert adapter_elements(PLANNED, one, 2, "s_lora", replicated_only=True) == 0
        assert elements[1] == pytest.approx(elements[0] - replicated / 2)
        assert 2 * elements[1] == adapter_elements(PLANNED, one, 1)
    around = replace(fold, lora_sharding="rank_exchange")
    uses = [memory_use(PLANNED, jobs, plan, HARDWARE) for plan in (fold, s_lora, around)]
    assert uses[2] == uses[0]
    assert uses[1].adapter_states < uses[0].adapter_states
    assert uses[1].adapter_weights < uses[0].adapter_weights
    assert uses[1].activations > uses[0].activations, "the places of what is exchanged"


def test_blocks_make_all_shardings_the_same() -> None:
    jobs = [job(rank=16, num_blocks=2)]
    times = {
        name: sharding_times(PLANNED, jobs, Plan(tp_size=2, micro_batch_tokens=512), HARDWARE)[name]
        for name in SHARDINGS
    }
    assert times["s_lora"] == pytest.approx(times["fold"], rel=1e-9)
    assert sharding_options(jobs, Plan(tp_size=2), None) == ("fold",)
    assert sharding_options([job()], Plan(), None) == ("fold",)
    assert sharding_options([job()], Plan(tp_size=2), "rank_exchange") == ("rank_exchange",)


LAYERS, ROWS = PLANNED.num_layers, 128
QKV_OUT, PROJ_OUT = 140 // 2, 100
QKV_IN, PROJ_IN = 100, 100 // 2
"""Shapes of q_proj's and o_proj's linears on one rank of two."""


def lora_s(sharding: LoraSharding, blocks: bool = False, **rates: float) -> float:
    """Seconds of q_proj's and o_proj's adapters of rank 16 in a layer, of 128 rows over two ranks.

    Args:
        blocks: a second job beside, as large, with block-diagonal adapters.
    """
    targets = ("q_proj", "o_proj")
    jobs = [job(targets=targets)]
    jobs += [job(name="b", targets=targets, num_blocks=2)] * blocks
    plan = Plan(tp_size=2, micro_batch_tokens=512, lora_sharding=sharding)
    hardware = replace(HARDWARE, lora=replace(FREE_LORA, **rates))
    return step_cost(PLANNED, jobs, plan, hardware).lora_s / LAYERS


def test_s_lora_moves_what_it_exchanges_and_makes_no_pass_over_outputs() -> None:
    # A rank's half of s is picked out of q_proj and whole s put back; of dS the reverse, and half
    # of a chunk is filled up. Of o_proj all is picked out and put back. s holds a value twice.
    values = (8 + 2 * 16) + (16 + 2 * 16) + 2 * (16 + 2 * 16)
    assert lora_s("s_lora") == pytest.approx(ROWS * values * (4 + 2 + 2) / 1e9)
    assert lora_s("fold") == 0


def test_rank_exchange_adds_its_branch_in_passes() -> None:
    passes = 2 * (QKV_OUT + PROJ_OUT) + 4 * (QKV_IN + PROJ_IN)
    assert lora_s("rank_exchange") == pytest.approx(ROWS * passes * 2 / 1e9)


def test_s_lora_reads_its_slice_of_a_row_parallel_linear_s_gradient() -> None:
    moved = lora_s("s_lora")
    read = {name: lora_s(name, backward_stream_s=1.0) for name in ("fold", "s_lora")}
    inputs = QKV_IN + PROJ_IN
    assert read["fold"] == pytest.approx(ROWS * (2 * (QKV_OUT + PROJ_OUT) + inputs))
    assert read["s_lora"] - moved == pytest.approx(ROWS * (2 * (QKV_OUT + 50) + inputs))


def test_block_diagonal_jobs_beside_s_lora_are_calls_and_passes_of_their_own() -> None:
    """There are twice as many rows in all; the standard job exchanges those of its own alone."""
    moved = 2 * ROWS * (2 * (QKV_OUT + PROJ_OUT) + 4 * (QKV_IN + PROJ_IN)) * 2 / 1e9
    assert lora_s("s_lora", blocks=True) == pytest.approx(moved + lora_s("s_lora"))
    for name, calls in (("fold", 2), ("rank_exchange", 2), ("s_lora", 4)):
        fixed = lora_s(name, blocks=True, forward_fixed_s=1.0) - lora_s(name, blocks=True)
        assert fixed == pytest.approx(calls), name
    more = lora_s("s_lora", blocks=True, forward_input_s=1.0) - lora_s("s_lora", blocks=True)
    assert more == pytest.approx(2 * (2 * ROWS) * (QKV_IN + PROJ_IN))


def test_plans_say_it_to_the_run(tmp_path: Path) -> None:
    repo = Path(__file__).parents[3]
    config = load_config(repo / "configs" / "quickstart.yaml", output_dir=str(tmp_path / "out"))
    plan = Plan(tp_size=2, lora_sharding="s_lora")
    assert "s_lora" in plan.label
    assert "deepspeed" not in plan.runs_in
    assert plan.layout.lora_sharding == "s_lora"
    assert apply_plan(config, plan).parallel.lora_sharding == "s_lora"
    assert "parallel.lora_sharding=s_lora" in overrides_of(config, plan)
    assert apply_plan(config, Plan()).parallel.lora_sharding == "auto"
    assert misfit(PLANNED, Plan(lora_sharding="s_lora")) == "s_lora needs tensor parallelism"
