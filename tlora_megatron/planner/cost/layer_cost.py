"""Predicts the time of one decoder layer on one GPU for one micro-batch, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from tlora_megatron.model.layout import LoraSharding
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.planner.candidate import Plan
from tlora_megatron.planner.cost.adapter_sizes import (
    PLACE_BYTES,
    JobSums,
    LoraCounts,
    dense_linears,
    exchange_of,
    local_shape,
    lora_counts,
)
from tlora_megatron.planner.cost.expert_adapters import ExpertLora
from tlora_megatron.planner.cost.experts import RoutedWork, added, expert_split, gate_passes
from tlora_megatron.planner.cost.memory import ROW_TILE
from tlora_megatron.planner.cost.rates import Rates
from tlora_megatron.planner.cost.step_terms import exposed_share, num_parts
from tlora_megatron.planner.hardware import CollectiveOp
from tlora_megatron.planner.layouts import plan_spans
from tlora_megatron.planner.rounds.load import RoundLoad
from tlora_megatron.planner.workload import JobLoad

_GROUP = 128
"""Features of x that share a scale, over an FP8 base with scales of blocks."""
_CP_OPS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")
BLOCKS = ("attention", "mlp")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer, forward and backward together, without waiting for the host."""

    gemm_s: float
    attention_s: float
    elementwise_s: float
    lora_s: float
    recompute_s: float
    """Time of recomputation, its communication included."""
    tp_comm_s: float
    """Communication time that nothing hides."""
    cp_comm_s: float
    ep_comm_s: float = 0.0
    """Time of routed experts' exchanges, and of the waits for them."""
    attention_again: float = 0.0
    """Attention's part of `recompute_s`, relative to `attention_s`."""

    @property
    def total_s(self) -> float:
        return sum(self.times(1.0).values())

    def times(self, count: float) -> dict[str, float]:
        """Seconds of `count` layers by term."""
        return {name: count * getattr(self, name) for name in _LAYER_TERMS}


_LAYER_TERMS = tuple(f.name for f in fields(LayerCost) if f.name != "attention_again")


class _LayerTimes(NamedTuple):
    """Seconds of one layer, whatever runs again; pairs are forward and backward."""

    gemm_s: float
    attention: tuple[float, float]
    stream_s: float
    lora_s: float
    comm_s: float
    context: tuple[float, float]
    """Communication of context parallelism."""
    exchange: tuple[float, float]
    """Exchanges of routed experts."""
    forward_s: dict[str, float]
    """Forward of each block but attention itself, by block."""


class LayerModel:
    """Predicts layer times for one model, one mix of jobs and one kind of machine."""

    def __init__(
        self,
        spec: ModelSpec,
        jobs: Sequence[JobLoad],
        rates: Rates,
        sums: JobSums | None = None,
    ) -> None:
        if spec.fp8_linears and not rates.multiplies_fp8:
            raise ValueError(
                f"hardware profile must know FP8 products for an FP8 base, got "
                f"{rates.hardware.name}: write fp8_speedup into it if its GPU has them"
            )
        self.spec = spec
        self.jobs = tuple(jobs)
        self.rates = rates
        self._routed = None if spec.experts is None else RoutedWork(spec, rates)
        self._linears = dense_linears(spec)
        self._lora: dict[tuple[int, bool, LoraSharding], dict[str, list[LoraCounts]]] = {}
        self._attention: dict[int, tuple[tuple[float, ...], ...]] = {}
        self._sums = sums or JobSums()
        self._expert_lora = ExpertLora(spec, jobs, rates, self._sums)
        self._times: dict[object, tuple[_LayerTimes, RoundLoad]] = {}
        self._gemm_times: dict[tuple[int, float, str], tuple[float, float]] = {}
        self._drops = tuple(float(job.dropout > 0) for job in jobs)

    def cost(self, plan: Plan, load: RoundLoad) -> LayerCost:
        """The time of one layer on the rank with most rows; nano-batches are padded apart."""
        known = self._known(plan, load)
        again = 0.0
        if plan.recompute != "none":
            for block in ("mlp",) if plan.recompute == "selective" else BLOCKS:
                again += known.forward_s[block]
            again += known.exchange[0]
        attention, context = known.attention, known.context
        if plan.recompute == "full":
            again += attention[0] + context[0]
        return LayerCost(
            gemm_s=known.gemm_s,
            attention_s=sum(attention),
            elementwise_s=known.stream_s,
            lora_s=known.lora_s,
            recompute_s=again,
            tp_comm_s=known.comm_s,
            cp_comm_s=context[0] + context[1],
            ep_comm_s=sum(known.exchange),
            attention_again=attention[0] / sum(attention) if plan.recompute == "full" else 0.0,
        )

    def _known(self, plan: Plan, load: RoundLoad) -> _LayerTimes:
        """Times of a layer, kept: plans that differ in recompute or stages' layers share them."""
        sizes = plan.tp_size, plan.cp_size, plan.dp_size, plan.pp_size
        experts = plan.ep_size, plan.expert_tp_size
        choices = plan.sequence_parallel, plan.lora_sharding, plan.num_nano_batches
        jobs = id(load.job_tokens), id(load.job_sequences)
        key = *sizes, *experts, *choices, load.micro_batches, load.rows, load.filled, *jobs
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self._times_of(plan, load), load
        return found[0]

    def _times_of(self, plan: Plan, load: RoundLoad) -> _LayerTimes:
        parts = num_parts(plan, load)
        padding = (parts - 1) * ROW_TILE / 2 if load.filled is None else 0.0
        rows = load.rows / plan.cp_size + padding
        gemm = {b: _times(parts, self._gemms(plan, rows / parts, b)) for b in BLOCKS}
        attention = self._attend(plan, load)
        stream = {b: self._elementwise(plan, rows, b) for b in BLOCKS}
        lora = {b: self._adapters(plan, load, rows, b, parts) for b in BLOCKS}
        comm = {b: _times(parts, c) for b, c in self._tp_comm(plan, load, rows / parts).items()}
        exchange = (0.0, 0.0)
        if self._routed is not None:
            routed = self._routed.cost(plan, rows)
            gemm["mlp"], exchange = added(gemm["mlp"], routed.gemm_s), routed.exchange_s
            stream["mlp"] = added(stream["mlp"], routed.stream_s)
            split = expert_split(self.spec, plan)
            assert split is not None, "the model has experts"
            bins = load.micro_batches * plan.dp_size
            on_experts = self._expert_lora.times(split, load, rows, bins)
            lora["mlp"] = added(lora["mlp"], on_experts)
        if parts > 1:
            compute = _both(gemm) + sum(attention) + _both(stream) + _both(lora)
            exposed = exposed_share(parts, compute, _both(comm), self.rates.hardware.nano_overlap)
            comm, hidden = {b: _times(exposed, c) for b, c in comm.items()}, 0.0
        else:
            hidden = self._hidden(plan, rows, sum(backward for _, backward in lora.values()))
        return _LayerTimes(
            gemm_s=_both(gemm),
            attention=attention,
            stream_s=_both(stream),
            lora_s=_both(lora),
            comm_s=_both(comm) - hidden,
            context=self._cp_comm(plan, rows),
            exchange=exchange,
            forward_s={b: gemm[b][0] + stream[b][0] + lora[b][0] + comm[b][0] for b in BLOCKS},
        )

    def _gemms(self, plan: Plan, rows: float, block: str) -> tuple[float, float]:
        key = plan.tp_size, rows, block
        if key not in self._gemm_times:
            forward = backward = 0.0
            for linear in self._linears[block]:
                forward += self._linear_s(plan, rows, linear, backward=False)
                backward += self._linear_s(plan, rows, linear, backward=True)
            self._gemm_times[key] = forward, backward
        return self._gemm_times[key]

    def _linear_s(self, plan: Plan, rows: float, linear: str, *, backward: bool) -> float:
        """Time of a frozen linear in the mean layer; FP8 may leave some layers out."""
        columns, inner = local_shape(self.spec, linear, plan.tp_size)
        share = self.spec.fp8_share(linear)
        parts = ((False, 1.0 - share), (True, share))
        return sum(
            weight * self.rates.gemm_s(rows, columns, inner, backward=backward, fp8=fp8)
            for fp8, weight in parts
            if weight
        )

    def _attend(self, plan: Plan, load: RoundLoad) -> tuple[float, float]:
        """Time of attention: quadratic in sequences' lengths, shared evenly by CP ranks."""
        times = self._attention.get(plan.tp_size)
        if times is None:
            heads = self.spec.num_heads / plan.tp_size
            each = [self._attention_a_row(job, heads) for job in self.jobs]
            times = self._attention[plan.tp_size] = tuple(zip(*each, strict=True))
        forward, backward = (self._sums.mean(load, side) for side in times)
        filled = load.rows * load.filled_share
        forward, backward = filled * forward, filled * backward
        padding = round(load.rows - filled)
        if padding > 0:
            heads, dim = self.spec.num_heads / plan.tp_size, self.spec.head_dim
            own = self.rates.attention_s(padding, heads, dim)
            forward, backward = forward + own[0], backward + own[1]
        return forward / plan.cp_size, backward / plan.cp_size

    def _attention_a_row(self, job: JobLoad, heads: float) -> tuple[float, float]:
        dim, mean = self.spec.head_dim, job.lengths.mean
        times = [
            (share, self.rates.attention_s(length, heads, dim))
            for length, share in job.lengths.pairs
        ]
        forward, backward = (sum(s * t[side] for s, t in times) / mean for side in (0, 1))
        return forward, backward

    def _elementwise(self, plan: Plan, rows: float, block: str) -> tuple[float, float]:
        """Time of elementwise work: norms, residual sums, rotation and SwiGLU."""
        spec, size = self.spec, self.rates.element_bytes
        stream = rows * spec.hidden_size / (plan.tp_size if plan.sequence_parallel else 1)
        if block == "attention":
            heads = rows * (spec.q_size + 2 * spec.kv_size) / plan.tp_size
            forward, backward = 2 * stream + 2 * heads, 4 * stream + 2 * heads
        else:
            width = spec.ffn_size if spec.experts is None else spec.shared_ffn_size or 0
            ffn = rows * width / plan.tp_size
            forward, backward = 7 * stream + 3 * ffn, 4 * stream + 5 * ffn
            gate = gate_passes(spec, size)
            shares = stream / spec.hidden_size / size
            forward, backward = forward + shares * gate[0], backward + shares * gate[1]
        return self.rates.stream_s(forward * size), self.rates.stream_s(backward * size)

    def _adapters(
        self, plan: Plan, load: RoundLoad, rows: float, block: str, parts: int
    ) -> tuple[float, float]:
        cost = self.rates.hardware.lora
        bins = load.micro_batches * plan.dp_size
        filled = rows * load.filled_share
        dropped = load.filled_share * self._sums.mean(load, self._drops)
        forward = backward = 0.0
        for site in self._counts(plan)[block]:
            if not any(site.gradients):
                continue
            inputs = rows * site.in_size
            shard = plan.tp_size if plan.sequence_parallel and site.gathers else 1
            shard = 1 if site.keeps_whole else shard
            gradients = self._sums.present(load.job_sequences, bins, site.gradients)
            moved = self._moved_s(rows, load, site)
            forward += (
                site.calls * parts * cost.forward_fixed_s
                + cost.forward_input_s * rows * site.read_in
                + cost.forward_rank_s * filled * self._sums.mean(load, site.rank_columns)
                + cost.forward_factor_s * gradients
                + cost.forward_dropout_s * dropped * inputs
                + moved[0]
            )
            backward += (
                site.calls * parts * cost.backward_fixed_s
                + cost.backward_stream_s * rows * (2 * site.read_out + site.read_in / shard)
                + cost.backward_rank_s * filled * self._sums.mean(load, site.rank_inputs)
                + cost.backward_factor_s * gradients
                + cost.backward_dropout_s * dropped * inputs
                + moved[1]
            )
        return forward, backward

    def _moved_s(self, rows: float, load: RoundLoad, site: LoraCounts) -> tuple[float, float]:
        """Time of passes over a separate branch and of packing values for exchanges."""
        forward, backward = (n * self.rates.element_bytes for n in site.passes)
        if site.placed is not None:
            forward += load.filled_share * self._sums.mean(load, site.placed[0]) * PLACE_BYTES
            backward += load.filled_share * self._sums.mean(load, site.placed[1]) * PLACE_BYTES
        return self.rates.stream_s(rows * forward), self.rates.stream_s(rows * backward)

    def _counts(self, plan: Plan) -> dict[str, list[LoraCounts]]:
        key = plan.tp_size, plan.sequence_parallel, plan.lora_sharding
        if key not in self._lora:
            self._lora[key] = {
                block: [lora_counts(self.spec, self.jobs, linear, plan) for linear in linears]
                for block, linears in self._linears.items()
            }
        return self._lora[key]

    def _tp_comm(self, plan: Plan, load: RoundLoad, rows: float) -> dict[str, tuple[float, float]]:
        """Time of tensor-parallel collectives.

        Each block has one all-reduce each way; with sequence parallelism a gather and a scatter
        each way. Exchanges of s and dS are added.
        """
        if plan.tp_size == 1:
            return dict.fromkeys(BLOCKS, (0.0, 0.0))
        comm = {}
        for block, sites in self._counts(plan).items():
            ranked = [self._exchanges(plan, load, rows, site) for site in sites]
            forward, backward = (sum(both[side] for both in ranked) for side in (0, 1))
            whole = self._hidden_states(plan, rows, sites) if sites else (0.0, 0.0)
            comm[block] = whole[0] + forward, whole[1] + backward
        if self._routed is not None and plan.expert_tp == plan.tp_size:
            # Rows go to whole experts from where they are, but to cut ones as to an MLP.
            comm["mlp"] = added(comm["mlp"], self._hidden_states(plan, rows, ()))
        return comm

    def _hidden_states(
        self, plan: Plan, rows: float, sites: Sequence[LoraCounts]
    ) -> tuple[float, float]:
        """Time of what carries hidden states to and from a block, forward and backward."""
        size = rows * self.spec.hidden_size * self.rates.element_bytes
        if not plan.sequence_parallel:
            once = self._over_tp(plan, "all_reduce", size)
            return once, once
        gather = self._over_tp(plan, "all_gather", size)
        scatter = self._over_tp(plan, "reduce_scatter", size)
        # Over an FP8 base, codes and scales of x travel, but where adapters need all of x itself.
        columns = (site for site in sites if site.gathers and not site.keeps_whole)
        share = max((self.spec.fp8_share(column.linear) for column in columns), default=0.0)
        groups = -(-self.spec.hidden_size // _GROUP) if self.spec.fp8_in_blocks else 1
        codes = self._over_tp(plan, "all_gather", rows * self.spec.hidden_size)
        codes += self._over_tp(plan, "all_gather", rows * groups * 4)
        return share * codes + (1 - share) * gather + scatter, gather + scatter

    def _exchanges(
        self, plan: Plan, load: RoundLoad, rows: float, site: LoraCounts
    ) -> tuple[float, float]:
        """Time of the collectives of s and dS on one linear, forward and backward."""
        exchange = exchange_of(plan, site)
        is_fold = plan.lora_sharding == "fold"
        width = site.widest if is_fold else self._sums.mean(load, site.exchanged)
        size = rows * self.rates.element_bytes * width
        forward, backward = (sum(self._over_tp(plan, op, size) for op in ops) for ops in exchange)
        if plan.lora_sharding == "fold":
            # Where fold sums dS, x may travel as codes: s is then made of own rows, and summed too.
            forward += self.spec.fp8_share(site.linear) * backward
        return forward, backward

    def _over_tp(self, plan: Plan, op: CollectiveOp, size_bytes: float) -> float:
        hardware = self.rates.hardware
        over = plan_spans(plan, hardware.gpus_per_node).tp
        return hardware.stretch * self.rates.collective_s(op, plan.tp_size, size_bytes, over=over)

    def _hidden(self, plan: Plan, rows: float, lora_backward_s: float) -> float:
        """Communication hidden behind compute: reductions of dx run beside dA.

        dA is about half of the adapters' backward. A black box waits for its own reductions.
        """
        if plan.tp_size == 1 or plan.lora_sharding == "rank_exchange":
            return 0.0
        size = rows * self.spec.hidden_size * self.rates.element_bytes
        op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
        blocks = sum(bool(linears) for linears in self._linears.values())
        reductions = blocks * self._over_tp(plan, op, size)
        return self.rates.hardware.overlap * min(reductions, lora_backward_s / 2)

    def _cp_comm(self, plan: Plan, rows: float) -> tuple[float, float]:
        """Time of context parallelism: keys and values are gathered, their gradients scattered."""
        if plan.cp_size == 1:
            return 0.0, 0.0
        width = 2 * self.spec.kv_size / plan.tp_size
        size = rows * plan.cp_size * width * self.rates.element_bytes
        over = plan_spans(plan, self.rates.hardware.gpus_per_node).cp
        forward, backward = (
            self.rates.collective_s(op, plan.cp_size, size, over=over) for op in _CP_OPS
        )
        return forward, backward


def _times(factor: float, both: tuple[float, float]) -> tuple[float, float]:
    return factor * both[0], factor * both[1]


def _both(parts: dict[str, tuple[float, float]]) -> float:
    return sum(forward + backward for forward, backward in parts.values())
