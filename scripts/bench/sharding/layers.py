"""Decoder layers that hold one sharding strategy's adapters after another."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tlora_megatron.config.job import LoraSpec
from tlora_megatron.layers.adapter_bank import Adapter, AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.layers.sites import stage_sites
from tlora_megatron.layers.slab import factor_shape
from tlora_megatron.model.layout import LoraSharding, ParallelLayout
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import Document, MicroBatchView, pack_micro_batch, use_micro_batch
from tlora_megatron.parallel.collectives import all_reduce
from tlora_megatron.profiling.sizes import TINY as SIZES
from tlora_megatron.profiling.synthetic_run import SyntheticRun

TINY = replace(SIZES.layer_spec, num_heads=8, num_kv_heads=4, head_dim=8, ffn_size=128)
LAYERS = {"tiny": 2, "llama-3.1-8b": 8, "llama-3.1-70b": 4}
DOCUMENT = 512


class Strategy(NamedTuple):
    name: str
    sharding: LoraSharding
    blocks: bool = False
    equal_parameters: bool = False


FROZEN = "frozen"
STRATEGIES = (
    Strategy("fold", "fold"),
    Strategy("rank_exchange", "rank_exchange"),
    Strategy("s_lora", "s_lora"),
    Strategy("block_diagonal", "fold", blocks=True),
    Strategy("block_diagonal_equal_parameters", "fold", blocks=True, equal_parameters=True),
)


class Case(NamedTuple):
    adapters: int
    rank: int


class Collectives(TorchDispatchMode):
    """Counts collectives where torch dispatches them, and the bytes of their whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.name():
            self.calls += 1
            self.bytes += max(map(tensor_bytes, args))
        return func(*args, **(kwargs or {}))


def tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


class Layers:
    """A few decoder layers on this rank, and the banks that take turns on them."""

    def __init__(self, spec: ModelSpec, layout: ParallelLayout, dtype: torch.dtype) -> None:
        self.spec, self.layout, self.dtype = spec, layout, dtype
        self.run = SyntheticRun(spec, layout, dtype=dtype)
        self.groups = self.run.groups
        self.decoder = self.run.engine.model.decoder
        frozen = AdapterBank(self.run.sites, [], dtype=dtype, device=self.groups.device)
        self.banks = {FROZEN: frozen}
        self.sites = {FROZEN: self.run.sites}

    def adopt(self, other: Layers) -> None:
        """Takes the frozen weights of others, whatever their dtype."""
        mine: Any = self.run.engine.model
        mine.load_state_dict(other.run.engine.model.state_dict())

    def prepare(self, case: Case, strategies: Sequence[Strategy]) -> dict[str, LoraSpec]:
        """Makes a bank a strategy, with adapters drawn by name; returns their shapes."""
        loras = {}
        for strategy in strategies:
            layout = replace(self.layout, lora_sharding=strategy.sharding)
            ranks = {"tp_rank": self.groups.tp_rank, "pp_rank": 0}
            self.sites[strategy.name] = stage_sites(self.spec, layout, **ranks)
            lora = loras[strategy.name] = lora_of(strategy, case, self.spec, layout.tp_size)
            self.banks[strategy.name] = self._bank(strategy.name, [lora] * case.adapters)
        return loras

    def _bank(self, name: str, loras: Sequence[LoraSpec]) -> AdapterBank:
        sites, device = self.sites[name], self.groups.device
        bank = AdapterBank(sites, loras, dtype=self.dtype, device=device)
        adapters = []
        for index, lora in enumerate(loras):
            slab = bank.new_slab(lora)
            slab.exp_avg = slab.exp_avg_sq = slab.master[:0]  # no step is taken: room for more
            views = slab.layout.views(slab.master)
            for factor, view in zip(slab.layout.factors, views, strict=True):
                shape = factor_shape(self.spec, factor.name, lora)
                generator = torch.Generator(device).manual_seed(zlib.crc32(factor.name.encode()))
                whole = torch.randn(shape, generator=generator, device=device)
                part = torch.empty(factor.shape)
                factor.take(whole.cpu(), part)
                view.copy_(part / (shape[1] ** 0.5))
            adapters.append(Adapter(name=f"job{index}", lora=lora, slab=slab))
        bank.install(adapters)
        return bank

    def take(self, name: str) -> None:
        modules = [module for _, module in self.run.linears]
        attach(list(zip(self.sites[name], modules, strict=True)), self.banks[name])

    def passes(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward; returns the output and the input's gradient."""
        hidden = batch.hidden.detach().requires_grad_()
        with use_micro_batch(batch.view):
            out = self.decoder(hidden_states=hidden, attention_mask=None)
        out.backward(batch.gradient)
        assert hidden.grad is not None
        return out.detach(), hidden.grad

    def replicated(self, name: str) -> list[torch.Tensor]:
        """Each job's gradient of replicated factors, to be summed over TP at its step."""
        slabs = [adapter.slab for adapter in self.banks[name].adapters]
        parts = [slab.grad[: slab.layout.replicated_numel] for slab in slabs]
        return [part for part in parts if part.numel()]

    def step(self, name: str, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, backward and the sum of replicated gradients, as the optimizer starts them."""
        found = self.passes(batch)
        group = self.groups.tp_group
        for pending in [all_reduce(part, group) for part in self.replicated(name)]:
            pending.wait()
        return found

    def gradient_norm(self, name: str) -> float:
        """Norm of all adapters' gradients, summed as the optimizer sums; forgets the gradients."""
        squares = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        for adapter in self.banks[name].adapters:
            slab = adapter.slab
            begin = 0 if self.groups.tp_rank == 0 else slab.layout.replicated_numel
            squares += slab.grad[begin:].double().square().sum()
            slab.zero_grad()
        dist.all_reduce(squares, group=self.groups.tp_group)
        return float(squares.sqrt())

    def forget(self) -> None:
        """Gives back the memory of all banks but the frozen layers'."""
        self.take(FROZEN)
        for name in [name for name in self.banks if name != FROZEN]:
            del self.banks[name], self.sites[name]


class Batch(NamedTuple):
    view: MicroBatchView
    hidden: torch.Tensor
    gradient: torch.Tensor


def make_batch(layers: Layers, adapters: int, tokens: int) -> Batch:
    """Equally many rows a job, in documents; the same on every rank, which holds its rows."""
    rows = tokens // adapters
    sizes = [min(DOCUMENT, rows - begin) for begin in range(0, rows, DOCUMENT)]
    documents = [Document(slot=slot, length=n) for slot in range(adapters) for n in sizes]
    view = pack_micro_batch(documents, num_slots=adapters, num_tokens=tokens)
    groups, layout = layers.groups, layers.layout
    generator = torch.Generator(groups.device).manual_seed(0)
    shape = (tokens, 1, layers.spec.hidden_size)
    both = [torch.randn(shape, generator=generator, device=groups.device) for _ in range(2)]
    if layout.sequence_parallel:
        both = [t.chunk(layout.tp_size)[groups.tp_rank].contiguous() for t in both]
    hidden, gradient = (t.to(layers.dtype) for t in both)
    return Batch(view, hidden, gradient * 1e-3)


def lora_of(strategy: Strategy, case: Case, spec: ModelSpec, tp_size: int) -> LoraSpec:
    """The adapters' shape; block-diagonal ones have as many blocks as TP has ranks."""
    if not strategy.blocks:
        return LoraSpec(rank=case.rank, alpha=case.rank)

    def blocks(rank: int) -> LoraSpec:
        return LoraSpec(rank=rank, alpha=rank, parametrization="block_diagonal", num_blocks=tp_size)

    rank = -(-case.rank // tp_size) * tp_size
    if strategy.equal_parameters:
        wanted = parameters(spec, LoraSpec(rank=case.rank)) / parameters(spec, blocks(tp_size))
        rank = max(1, round(wanted)) * tp_size
    return blocks(rank)


def parameters(spec: ModelSpec, lora: LoraSpec) -> int:
    names = [f"layers.0.{t}.lora_{w}" for t in lora.target_modules for w in "ab"]
    shapes = [factor_shape(spec, name, lora) for name in names]
    return sum(rows * columns for rows, columns in shapes)
