"""Bytes of routed experts against what a layer of them allocates on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.planner_case import HARDWARE, SPEC, job, memory_use
from tlora_megatron.config.job import (
    EXPERT_TARGETS,
    FUSED_EXPERT_TARGETS,
    SHARED_EXPERT_TARGETS,
    LoraSpec,
)
from tlora_megatron.integrations.megatron.layer import expert_parts, frozen_experts
from tlora_megatron.integrations.megatron.layer.frozen_experts import FrozenExperts
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.linear import LinearLayout
from tlora_megatron.layers.multi_adapter import MegatronLinearMixin
from tlora_megatron.layers.sites import Site, stage_sites
from tlora_megatron.layers.slab_layout import slab_layout
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.spec import ExpertsSpec
from tlora_megatron.ops.routing import Document, pack_micro_batch
from tlora_megatron.parallel import collectives
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.expert_adapters import expert_elements, kept_inputs, routed_bytes
from tlora_megatron.planner.cost.experts import expert_split, shared_bytes
from tlora_megatron.planner.cost.memory import (
    COMMUNICATOR_BYTES,
    kept_bytes,
    saved_inputs,
    workspace_bytes,
)
from tlora_megatron.planner.workload import JobLoad, LengthHistogram

ROWS, HIDDEN = 256, 64
QWEN = ExpertsSpec(num_experts=8, top_k=4, ffn_size=48, normalizes=True)
WIDE = replace(QWEN, ffn_size=200, top_k=2)
MIXTRAL = replace(WIDE, keeps_fp32=True, num_experts=4)
BASE = replace(SPEC, hidden_size=HIDDEN, head_dim=8, num_heads=8)


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that exist, and the most that did."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._living = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):  # what was there before, of which there may be views
                self._add(tensor.untyped_storage(), is_new=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.most = max(self.most, self.now)
        return out

    def _add(self, storage: torch.UntypedStorage, *, is_new: bool = True) -> None:
        key = storage._cdata
        if key not in self._living:
            self._living[key] = is_new * storage.nbytes()
            self.now += self._living[key]
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._living.pop(key, 0)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts without processes: what a rank sends comes back to it."""

    # What the kernels of a GPU allocate; on the CPU there are copies in fp32.
    def weighted(inner: Tensor, weights: Tensor, glu: None) -> Tensor:
        return inner.new_zeros(len(inner), inner.shape[1] // 2)

    def weighted_back(
        grad: Tensor, inner: Tensor, weights: Tensor, glu: None, *, with_result: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        dweights = inner.new_zeros(len(inner), dtype=torch.float32)
        return torch.zeros_like(inner), dweights, torch.zeros_like(grad) if with_result else None

    def activated(x: Tensor) -> tuple[Tensor, Any]:
        y = x.new_zeros(len(x), x.shape[1] // 2)
        return y, lambda dy: torch.zeros_like(x)

    def echo(out: Tensor, sent: Tensor, *sizes: Any, group: Any) -> None:
        out.copy_(sent)

    groups = SimpleNamespace(get_expert_model_parallel_group=lambda: None)
    monkeypatch.setattr(frozen_experts, "parallel_state", groups)
    monkeypatch.setattr(frozen_experts, "weighted_glu", weighted)
    monkeypatch.setattr(frozen_experts, "weighted_glu_back", weighted_back)
    own = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    monkeypatch.setattr(expert_parts, "parallel_state", own)
    monkeypatch.setattr(expert_parts, "ColumnParallelLinear", Linear)
    monkeypatch.setattr(expert_parts, "RowParallelLinear", Linear)
    monkeypatch.setattr(expert_parts, "swiglu_vjp", activated)
    monkeypatch.setattr(collectives.dist, "all_to_all_single", echo)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


class Linear(nn.Module, MegatronLinearMixin):
    """A linear of the shared expert, of one rank."""

    bias = None

    def __init__(self, in_size: int, out_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        weight = torch.empty(out_size, in_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def adapter_layout(self, site: Site) -> LinearLayout:
        return LinearLayout(kind=site.kind)


def allocated(
    spec: ExpertsSpec,
    ep_size: int,
    dtype: torch.dtype,
    lora: LoraSpec | None = None,
    shared_ffn_size: int | None = None,
) -> tuple[float, float]:
    """Bytes a row that a layer's experts keep, and that their backward needs in addition.

    Args:
        lora: of the one job, which has all rows; None = no adapter is on the experts.
        shared_ffn_size: of the expert beside them, if there is one.
    """
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        params_dtype=dtype,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        init_method=None,
    )
    experts = FrozenExperts(
        config, spec=spec, ep_size=ep_size, expert_tp=1, shared_ffn_size=shared_ffn_size
    )
    weights = [parameter.detach().normal_(0, 0.1) for parameter in experts.parameters()]
    x, dy = (torch.randn(ROWS, HIDDEN, dtype=dtype) for _ in range(2))
    view = None
    if lora is not None or shared_ffn_size is not None:
        base = replace(BASE, num_layers=1, experts=spec, ffn_size=spec.ffn_size)
        base = replace(base, shared_ffn_size=shared_ffn_size)
        layout = ParallelLayout(ep_size=ep_size, dp_size=ep_size)
        sites = stage_sites(base, layout, tp_rank=0, pp_rank=0, place=layout.expert_place(0))
        loras = [] if lora is None else [lora]
        bank = AdapterBank(sites, loras, dtype=dtype, device=torch.device("cpu"))
        bank.install([Adapter(name="a", lora=own, slab=bank.new_slab(own)) for own in loras])
        holders = {"experts": experts.experts, "shared": experts.shared_experts}
        for site in (site for site in sites if site.linear.partition("_")[0] in holders):
            holder, name = site.linear.split("_")
            getattr(holders[holder], f"linear_{name}").bind_adapters(bank, site)
        rows = Document(slot=0, length=ROWS)
        view = pack_micro_batch([rows] * len(loras), num_slots=len(loras), num_tokens=ROWS)
        view.rows.row_slots(torch.device("cpu"))
    with torch.no_grad(), Allocated(x, dy, *weights) as found:
        compute: Any = experts.compute_vjp if shared_ffn_size is None else experts.parts[1]
        y, back = compute(x, view)
        kept = found.now - y.untyped_storage().nbytes()
        found.most = before = found.now
        back(dy)
    return kept / ROWS, (found.most - before) / ROWS


LORAS = {
    "own": LoraSpec(rank=16, target_modules=EXPERT_TARGETS),
    "fused": LoraSpec(rank=4, expert_rank=16, target_modules=FUSED_EXPERT_TARGETS),
    "down": LoraSpec(rank=16, target_modules=EXPERT_TARGETS[2:]),
    "outer": LoraSpec(rank=16, expert_sharing="outer", target_modules=EXPERT_TARGETS),
    "outer, attention": LoraSpec(
        rank=8, expert_rank=16, expert_sharing="outer", target_modules=("q_proj", *EXPERT_TARGETS)
    ),
    "small": LoraSpec(rank=16, expert_rank=3, target_modules=EXPERT_TARGETS),
}


def load_of(lora: LoraSpec) -> JobLoad:
    return JobLoad(
        name="a",
        rank=lora.rank,
        targets=lora.target_modules,
        expert_rank=lora.expert_rank,
        shares_outer=lora.shares_outer,
        batch_size=1,
        lengths=LengthHistogram.single(128),
    )


CASES: dict[str, tuple[ExpertsSpec, LoraSpec | None]] = {
    "narrow": (QWEN, None),
    "not normalised": (replace(QWEN, normalizes=False), None),
    "wide": (WIDE, None),
    "mixtral": (MIXTRAL, None),
    **{f"narrow, {name}": (QWEN, lora) for name, lora in list(LORAS.items())[:4]},
    **{f"wide, {name}": (WIDE, lora) for name, lora in list(LORAS.items())[:4]},
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize(("spec", "lora"), CASES.values(), ids=CASES)
def test_what_is_counted_is_what_is_allocated(
    spec: ExpertsSpec, ep_size: int, dtype: torch.dtype, lora: LoraSpec | None
) -> None:
    base, jobs = (
        replace(BASE, experts=spec, ffn_size=spec.ffn_size),
        [load_of(lora)] if lora else [],
    )
    split = expert_split(base, Plan(dp_size=ep_size, ep_size=ep_size))
    assert split is not None
    adapters = kept_inputs(base, jobs, split)
    counted = routed_bytes(split, dtype.itemsize, adapters)
    even = (counted.workspace - spec.num_experts * (4 + dtype.itemsize)) / split.fullest()
    kept, worked = allocated(spec, ep_size, dtype, lora)
    # The layer's input, or what is sent of it, exists whether experts keep it or not.
    is_input = adapters.first_summed > 0 or (adapters.reads_routed and ep_size == 1)
    given = is_input * HIDDEN * dtype.itemsize
    # Beside rows, a few numbers of each expert are kept.
    assert counted.kept + counted.kept_routed - given == pytest.approx(kept, abs=1)
    # A GPU has the rank columns of all rows at once, a CPU those of one run of rows.
    columns = max(adapters.first_columns, adapters.second_columns) * dtype.itemsize
    assert even <= 1.01 * worked + split.routed * columns
    # And a CPU sums gradients from fp32 copies of an expert's rows, twice the mean one's at most.
    copies = 2 * 4 * (HIDDEN + 2 * spec.ffn_size) * split.routed / split.num_local if lora else 0.0
    # A layer's backward has the residual stream's gradients in addition, `workspace_bytes`.
    assert worked <= 1.01 * even + 3 * HIDDEN * dtype.itemsize + copies


SHARED_LORAS = {
    "none": None,
    "all": LoraSpec(rank=16, target_modules=SHARED_EXPERT_TARGETS),
    "down": LoraSpec(rank=16, target_modules=SHARED_EXPERT_TARGETS[2:]),
    "with routed": LoraSpec(rank=16, target_modules=EXPERT_TARGETS + SHARED_EXPERT_TARGETS),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("width", [40, 2000], ids=["small", "large"])
@pytest.mark.parametrize("lora", SHARED_LORAS.values(), ids=SHARED_LORAS)
def test_what_is_counted_of_a_shared_expert_is_what_is_allocated(
    width: int, ep_size: int, dtype: torch.dtype, lora: LoraSpec | None
) -> None:
    base = replace(BASE, experts=WIDE, ffn_size=WIDE.ffn_size, shared_ffn_size=width)
    plan, jobs = Plan(dp_size=ep_size, ep_size=ep_size), [] if lora is None else [load_of(lora)]
    split, saved = expert_split(base, plan), saved_inputs(base, jobs, plan)
    assert split is not None
    size = dtype.itemsize
    counted = kept_bytes(base, saved, plan, size, part="mlp")
    routed = routed_bytes(split, size, saved.experts)
    counted -= (split.fullest() - 1) * routed.kept_routed
    kept, worked = allocated(WIDE, ep_size, dtype, lora, width)
    on_routed = lora is not None and bool(lora.expert_targets)
    # The layer's input exists whether experts keep it or not.
    given = (saved.ranks["shared_fc1"] > 0 or (on_routed and ep_size == 1)) * HIDDEN * size
    # A CPU keeps s in one form, a GPU its own columns, too.
    form = sum(saved.ranks[linear] / 2 for linear in ("shared_fc1", "shared_fc2")) * size
    assert counted - given - form == pytest.approx(kept, abs=2)
    if on_routed:
        return  # sums in fp32 on the CPU; without adapters there, backward is the same
    worst = workspace_bytes(base, saved, plan, size) - 3 * HIDDEN * size
    shared = shared_bytes(base, saved.ranks, plan, size, keeps_input=True).workspace
    # What the routed experts kept is gone when the shared one's backward comes.
    assert worst == max(routed.workspace, shared - routed.kept - routed.kept_routed)
    copies = 4 * (width + HIDDEN) * (lora is not None)  # of adapters' rows, in fp32
    assert worked <= worst + 3 * HIDDEN * size + copies
    if worst > routed.workspace:
        assert worst <= 1.01 * worked


LAYOUTS = {
    "one process": Plan(),
    "EP2": Plan(dp_size=2, ep_size=2),
    "TP2": Plan(tp_size=2),
    "TP2, experts whole": Plan(tp_size=2, sequence_parallel=True, expert_tp_size=1),
    "TP2 x EP2": Plan(tp_size=2, dp_size=2, ep_size=2),
    "TP2 x EP2, experts whole": Plan(
        tp_size=2, sequence_parallel=True, expert_tp_size=1, ep_size=2
    ),
    "PP2 x EP2": Plan(pp_size=2, dp_size=2, ep_size=2),
}


ON_SHARED = LoraSpec(rank=16, target_modules=("q_proj", *SHARED_EXPERT_TARGETS))


@pytest.mark.parametrize("lora", [*LORAS.values(), ON_SHARED], ids=[*LORAS, "shared expert"])
@pytest.mark.parametrize("plan", LAYOUTS.values(), ids=LAYOUTS)
def test_states_of_adapters_on_experts_are_those_of_their_slabs(plan: Plan, lora: LoraSpec) -> None:
    base = replace(BASE, num_layers=2, experts=QWEN, ffn_size=QWEN.ffn_size)
    base = replace(base, shared_ffn_size=80 if lora is ON_SHARED else None)
    layout = plan.layout
    sites = stage_sites(base, layout, tp_rank=0, pp_rank=0, place=layout.expert_place(0))
    slab = slab_layout(sites, lora)
    planned = replace(plan, micro_batch_tokens=256)
    use = memory_use(base, [load_of(lora)], planned, HARDWARE)
    assert use.adapter_gradients == 4 * slab.numel
    assert use.adapter_states == 12 * slab.numel
    on_experts = sum(f.numel for f in slab.factors if f.shard.target in lora.expert_targets)
    # Ranks of dense linears are stored in whole chunks.
    dense = (slab.numel - on_experts) * (2 if lora.rank == 8 else 1)
    assert use.adapter_weights == 2 * (_copied(sites, lora) + dense)
    split = expert_split(base, planned)
    found = expert_elements(base, load_of(lora), split)
    assert found.total * base.num_layers / plan.pp_size == on_experts
    replicated = slab.experts_replicated
    assert found.replicated * base.num_layers / plan.pp_size == replicated


def _copied(sites: Sequence[Site], lora: LoraSpec) -> int:
    """Elements that a bank allocates for an adapter's compute copy on routed experts."""
    bank = AdapterBank(sites, [lora], dtype=torch.float32, device=torch.device("cpu"))
    bank.install([Adapter(name="a", lora=lora, slab=bank.new_slab(lora))])
    arenas = [factors.arenas for factors in bank.expert_factors.values()]
    held = [t for arena in arenas if arena is not None for t in (arena.lora_a, arena.lora_b)]
    outer = [side for one in bank.outer_factors.values() for side in (one.shared, one.own)]
    held += [target.weight for side in outer for of_slot in side.targets for target in of_slot]
    return sum(tensor.numel() for tensor in held)


def test_memory_of_the_experts_that_a_rank_holds() -> None:
    base = replace(BASE, experts=QWEN, ffn_size=QWEN.ffn_size)
    dense = 2 * BASE.hidden_size + HIDDEN * (2 * 64 + 2 * BASE.kv_size)
    router, each = 8 * HIDDEN, 3 * 48 * HIDDEN

    def layer(plan: Plan) -> float:
        tables = 2 * -(-BASE.vocab_size // plan.tp_size) * HIDDEN + HIDDEN
        use = memory_use(base, [job()], replace(plan, micro_batch_tokens=128), HARDWARE)
        return (use.base_weights / 2 - tables) / BASE.num_layers

    cut = 2 * BASE.hidden_size + HIDDEN * (64 + BASE.kv_size)
    sp = Plan(tp_size=2, sequence_parallel=True)
    assert layer(Plan()) == dense + router + 8 * each
    assert layer(Plan(dp_size=4, ep_size=4)) == dense + router + 2 * each
    assert layer(sp) == cut + router + 8 * each / 2
    assert layer(replace(sp, expert_tp_size=1)) == cut + router + 8 * each
    assert layer(replace(sp, expert_tp_size=1, ep_size=2)) == cut + router + 4 * each


def test_activations_of_routed_rows_by_recompute() -> None:
    base = replace(BASE, experts=QWEN, ffn_size=QWEN.ffn_size)

    def use(**changes: Any) -> Any:
        return memory_use(base, [job()], Plan(micro_batch_tokens=128, **changes), HARDWARE)

    none, selective, full = use(), use(recompute="selective"), use(recompute="full")
    split = expert_split(base, Plan())
    assert split is not None
    counted = routed_bytes(split, 2)
    routed = counted.kept + counted.kept_routed
    layers = BASE.num_layers
    assert none.activations - selective.activations == 128 * layers * (routed - HIDDEN * 2)
    assert selective.workspace == none.workspace + 128 * routed
    assert full.activations == 128 * layers * HIDDEN * 2
    shared = use(dp_size=2, ep_size=2)
    exchanged = 4 * 8 * split.fullest() * 128 * layers  # where a row came from
    assert shared.activations > none.activations + exchanged
    assert shared.workspace > none.workspace
    assert shared.collectives == 2 * COMMUNICATOR_BYTES  # of replicas, and of experts
