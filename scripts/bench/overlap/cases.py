"""Decoders with adapters, and the ways to run them that this benchmark times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tlora_megatron.integrations.megatron.staggered import stagger
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.routing import use_micro_batch
from tlora_megatron.parallel import collectives
from tlora_megatron.parallel.collectives import TensorCollectives
from tlora_megatron.parallel.overlap import Overlap
from tlora_megatron.planner.workload import JobLoad, LengthHistogram
from tlora_megatron.profiling.sizes import LLAMA_8B, LLAMA_70B, TINY
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.packing.packing import PackedBatch

RANKS = (8, 16, 32, 64)


MODELS = {
    "70b": replace(LLAMA_70B, num_layers=8),
    "8b": replace(LLAMA_8B, num_layers=16),
    "tiny": replace(TINY.layer_spec, num_kv_heads=4, ffn_size=160, num_layers=2),
}
"""Shapes of Llama-3.1, as many layers as a pipeline stage may have: what the last nano-batch sends
at the end of either pass has nothing to hide behind, however many there are. Embedding and head
are built and not timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One micro-batch on one model."""

    model: str
    sequences: int
    length: int
    adapters: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """`70b:8x1024:4`: model, sequences x tokens, adapters, each of one sequence at least."""
        model, shape, adapters = text.split(":")
        sequences, length = map(int, shape.split("x"))
        if model not in MODELS:
            raise ValueError(f"a case must name one of {', '.join(MODELS)}, got {text!r}")
        return cls(model=model, sequences=sequences, length=length, adapters=int(adapters))

    @property
    def label(self) -> str:
        return f"{self.model}:{self.sequences}x{self.length}:{self.adapters}"

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.length

    def loads(self) -> list[JobLoad]:
        """The jobs: ranks 8 to 64 in turn, all linears."""
        documents = max(self.sequences, self.adapters)
        return [
            JobLoad(
                name=f"job{index}",
                rank=RANKS[index % len(RANKS)],
                batch_size=documents // self.adapters,
                lengths=LengthHistogram.single(self.num_tokens // documents),
            )
            for index in range(self.adapters)
        ]


class Variant(NamedTuple):
    """One way to run a case."""

    mechanism: str
    count: int
    frozen: bool = False
    """Without adapters."""
    skips: bool = False
    """Without communication."""

    @property
    def name(self) -> str:
        frozen = "frozen " if self.frozen else ""
        return f"{frozen}{self.mechanism}" + (" skipped" if self.skips else "")


NONE, SKIPPED = Variant("none", 1), Variant("none", 1, skips=True)
FROZEN, FROZEN_SKIPPED = NONE._replace(frozen=True), SKIPPED._replace(frozen=True)


class Bench:
    """A decoder on this process and one case's micro-batch, cut in every way that is asked for."""

    def __init__(
        self, case: Case, layout: ParallelLayout, dtype: torch.dtype, layers: int | None
    ) -> None:
        spec = MODELS[case.model]
        if layers is not None:
            spec = replace(spec, num_layers=layers)
        self.case, self.spec, self.layout = case, spec, layout
        self.run = SyntheticRun(spec, layout, dtype=dtype)
        self.device, self.dtype = self.run.groups.device, dtype
        self.decoder: Any = self.run.engine.model.decoder
        self._overlaps: dict[str, Overlap] = {}
        self._in_fp32: Bench | None = None
        self.set_case(case)

    def set_case(self, case: Case) -> None:
        """Other jobs and another micro-batch on the same decoder."""
        self.case = case
        self.frozen_bank = self.run.super_model([], case.num_tokens).bank
        self._model = self.run.super_model(case.loads(), case.num_tokens)
        self._batches: dict[int, PackedBatch] = {}
        draw = torch.Generator(self.device).manual_seed(0)
        shape = (case.num_tokens, 1, self.spec.hidden_size)
        self._full = [
            torch.randn(shape, generator=draw, device=self.device, dtype=self.dtype)
            for _ in range(2)
        ]

    def in_fp32(self, layers: int | None) -> Bench:
        """The same weights, adapters and micro-batch in fp32; built once, as that takes seconds."""
        if self._in_fp32 is None:
            self._in_fp32 = Bench(self.case, self.layout, torch.float32, layers)
        else:
            self._in_fp32.set_case(self.case)
        self._in_fp32.adopt(self)
        return self._in_fp32

    def adopt(self, other: Bench) -> None:
        """Takes another bench's weights and adapters, whatever their dtype."""
        mine: Any = self.run.engine.model
        mine.load_state_dict(other.run.engine.model.state_dict())
        for job, source in zip(self._model.jobs, other._model.jobs, strict=True):
            job.adapter.slab.master.copy_(source.adapter.slab.master)
        self._model.set_jobs(self._model.jobs)

    def step(self, variant: Variant, make: Callable[[str], TensorCollectives]) -> Step:
        """Forward and backward of a variant, ready to run.

        Args:
            make: collectives by mechanism; each is made once.
        """
        overlap = None
        if variant.count > 1:
            if variant.mechanism not in self._overlaps:
                overlap = Overlap(make(variant.mechanism), self.device)
                stagger(self.decoder, overlap)
                self._overlaps[variant.mechanism] = overlap
            overlap = self._overlaps[variant.mechanism]
            overlap.num_nano_batches = variant.count
            overlap.streams(variant.count)
        bank = self.frozen_bank if variant.frozen else self._model.bank
        return Step(self, variant, self._batch(variant.count, overlap), overlap, bank)

    def forget_overlaps(self) -> None:
        self._overlaps.clear()

    def _batch(self, count: int, overlap: Overlap | None) -> PackedBatch:
        if count not in self._batches:
            self.run.engine.nano_batches.overlap = overlap
            (batch,) = self._model.begin_round()
            for job in self._model.jobs:
                job.end_batch()  # the next round has a batch again
            self._batches[count] = batch
        return self._batches[count]

    def local(self, batch: PackedBatch, index: int) -> torch.Tensor:
        """This process's rows of one of the two drawn tensors, in the order that they run in."""
        return self._full[index][self.rows(batch)]

    def rows(self, batch: PackedBatch) -> torch.Tensor:
        """Packed row of every row that this process holds between linears."""
        order = batch.order
        if order is None:
            order = torch.arange(batch.view.num_tokens, device=self.device)
        if not self.layout.sequence_parallel:
            return order
        return order.chunk(self.layout.tp_size)[self.run.groups.tp_rank]


class Step:
    """Forward and backward of the decoder in one variant."""

    def __init__(
        self, bench: Bench, variant: Variant, batch: PackedBatch, overlap: Overlap | None, bank: Any
    ) -> None:
        self.variant, self.batch = variant, batch
        self._bench, self._overlap, self._bank = bench, overlap, bank
        self.hidden = bench.local(self.batch, 0).requires_grad_()
        self.dout = bench.local(self.batch, 1)
        self.parts = max(1, len(self.batch.view.nano_views))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        bench = self._bench
        attach(bench.run.linears, self._bank)
        if self._overlap is not None:
            self._overlap.num_nano_batches = self.variant.count
            object.__setattr__(bench.decoder, "tlora_overlap", self._overlap)
        with without_communication() if self.variant.skips else contextlib.nullcontext():
            yield

    def __call__(self) -> None:
        """Runs it once; does not wait for the device."""
        self.hidden.grad = None
        with use_micro_batch(self.batch.view):
            out = self._bench.decoder(hidden_states=self.hidden, attention_mask=None)
        out.backward(self.dout)

    def gradient(self) -> torch.Tensor:
        """Gradient of the decoder's input, whole, in packed order `[T, 1, H]`."""
        grad = self.hidden.grad
        assert grad is not None, "the step has not run"
        rows = self._bench.rows(self.batch)
        whole = grad.new_zeros((self._bench.case.num_tokens, *grad.shape[1:]))
        whole[rows] = grad
        if self._bench.layout.sequence_parallel:
            dist.all_reduce(whole, group=self._bench.run.groups.tp_group)
        return whole


class _Done:
    def wait(self) -> None:
        """Nothing was started."""


@contextlib.contextmanager
def without_communication() -> Iterator[None]:
    """Leaves out the collectives: Megatron's, our linears', and NCCL's between nano-batches.

    Results have the right shapes; what other processes would have sent is whatever memory holds.
    """
    from megatron.core.tensor_parallel import layers, mappings

    def done(*args: Any, **kwargs: Any) -> _Done:
        return _Done()

    places = [(dist, "all_reduce"), (collectives, "_all_gather"), (collectives, "_reduce_scatter")]
    for module in (layers, mappings):
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            places += [(module, name)] if hasattr(module, name) else []
    with contextlib.ExitStack() as patches:
        for owner, name in places:
            patches.enter_context(mock.patch.object(owner, name, done))
        yield
