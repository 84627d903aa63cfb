"""Modes that take turns inside one life of the trainer, block of iterations by block."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from scripts.bench.flag_speed.cases import STOCK, WARMUP, Case, make_row
from scripts.bench.flag_speed.stock import StockModes
from scripts.bench.harness.clock import Marks, allocated, is_main, largest, peak_bytes, wait_for_all
from scripts.bench.harness.kernel_table import kernel_table
from scripts.bench.harness.rows import gpu_name, versions
from scripts.bench.harness.training_jobs import fresh_job
from tlora_megatron.config.schema import EMBEDDING, HEAD
from tlora_megatron.integrations.megatron.built.head import BuiltHead
from tlora_megatron.integrations.megatron.built.model import language_models
from tlora_megatron.integrations.megatron.layer.plain_layer import PlainLayer
from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import MultiAdapter, attach
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import quantised_on_reading
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.nano.rounds import NanoSettings, rank_aware_cut
from tlora_megatron.training.packing.packing import PackedBatch, RoundShape
from tlora_megatron.training.super_model import SuperModel


class OwnTrainer:
    """A second base of the same shape, with the same jobs, data, layout and nano-batches.

    Beside a trainer whose linears Transformer Engine runs in FP8, this base is quantised as
    `base_model.quantization: fp8` has it.

    Args:
        session: of the trainer under Megatron-LM's flag.
    """

    def __init__(self, session: Any, case: Case) -> None:
        theirs: SuperModel = session.loop.super_model
        spec, groups, dtype = session._run.spec, theirs.groups, theirs.bank.dtype
        layout = ParallelLayout(
            tp_size=case.tp,
            sequence_parallel=case.sequence_parallel,
            lora_sharding=groups.layout.lora_sharding,
        )
        is_fp8 = case.precision.startswith("fp8")
        quantisation = quantised_on_reading(spec, (EMBEDDING, HEAD)) if is_fp8 else None
        run = SyntheticRun(spec, layout, dtype=dtype, quantisation=quantisation)
        loras = [job.spec.lora for job in theirs.jobs]
        bank = AdapterBank(run.sites, loras, dtype=dtype, device=groups.device)
        attach(run.linears, bank)
        settings = NanoSettings.of_run(session._run.config.run, spec, dtype)
        run.engine.nano_batches = NanoBatches([run.engine.model], run.groups, settings)
        run.engine.nano_batches.set_count(case.nano)
        self.ran: list[PackedBatch] = []
        """The micro-batches of the last round."""
        self._model: Any = SuperModel(
            run.engine,
            bank,
            run.groups,
            [fresh_job(job.spec, job.data.train, bank, spec) for job in theirs.jobs],
            micro_batch_tokens=case.tokens,
            round_shape=RoundShape(num_micro_batches=lambda: 1, fills_budget=True),
            cut_for=partial(rank_aware_cut, spec),
        )

    def round(self) -> None:
        model = self._model
        self.ran = model.begin_round()
        model.end_round(model.engine.forward_backward(self.ran))

    def close(self) -> None:
        """Releases the collectives of its nano-batches; collective over the world."""
        self._model.engine.nano_batches.close()


class _Other(NamedTuple):
    """A mode beside the trainer's own."""

    mode: str
    step: Callable[[], object]
    tokens: Callable[[], int]
    """Those of the step that has run last."""
    beside: int
    """Bytes that are held and are not the mode's."""


class _Block(NamedTuple):
    seconds: list[float]
    tokens: int
    peak_bytes: int


class Turns:
    """Counts the trainer's iterations, and measures between them.

    The trainer's iterations are those of `flag`, then of `flag_modules`; then come `own` and
    `floor`, and all again.
    """

    def __init__(self) -> None:
        self.case = _read_case()
        self._count = 0
        self._mode = ""
        self._marks: Marks | None = None
        self._blocks: dict[str, list[_Block]] = defaultdict(list)
        self._batches: list[PackedBatch] = []
        """Micro-batches that the trainer has run last."""
        self._whole: list[PackedBatch] = []
        """The same, not in nano-batches."""
        self._tokens = 0
        self._own: OwnTrainer | None = None
        self._stock: StockModes | None = None
        self._own_bytes = self._other_bytes = 0
        modes = ["flag", *(["flag_modules"] if "flag_modules" in self.case.modes else [])]
        size = WARMUP + self.case.rounds
        self._plan = [mode for _ in range(self.case.turns) for mode in modes for _ in range(size)]
        self._looks = modes if self.case.kernels else []

    def iteration(self, session: Any, run: Callable[[], Any]) -> Any:
        """Runs one of the trainer's iterations; a mark at its beginning ends the one before."""
        if self._count == 0:
            self._start(session)
        index, size = self._count, WARMUP + self.case.rounds
        self._count += 1
        if index >= len(self._plan):
            return self._look(session, run, index - len(self._plan))
        if index % size == 0:
            self._mode = self._plan[index]
            _compute_by_modules(self._mode == "flag_modules")
            wait_for_all()
        if index % size >= WARMUP:
            self._mark(index % size == WARMUP)
        answer = run()
        self._tokens += real_tokens(self._batches)
        if index % size == size - 1:
            # The last iteration of a block ends here, without the trainer's log.
            self._mark(False)
            self._end()
            if self._plan[index + 1 : index + 2] != ["flag_modules"]:
                self._measure_rest(session)
        if index == len(self._plan) - 1:
            self._finish()
            if self._own is not None and not self._looks:
                self._own.close()
        return answer

    def _mark(self, is_first: bool) -> None:
        if is_first:
            wait_for_all()
            _reset_peak()
            self._tokens = 0
            self._marks = Marks(on_gpu=torch.cuda.is_available())
        assert self._marks is not None, "a block has a first mark"
        self._marks.set()

    def _end(self) -> None:
        assert self._marks is not None, "a block has marks"
        held = 0 if self._stock is None else self._stock.held_bytes()
        peak = peak_bytes() - self._own_bytes - held
        self._blocks[self._mode].append(_Block(self._marks.seconds(), self._tokens, peak))

    def _measure_rest(self, session: Any) -> None:
        _compute_by_modules(False)
        for mode, step, tokens, beside in self._others(session):
            block = _timed(step, self.case.rounds, tokens)
            self._blocks[mode].append(block._replace(peak_bytes=block.peak_bytes - beside))
        wait_for_all()

    def _others(self, session: Any) -> Iterator[_Other]:
        """Yields the modes that the trainer does not run, each while it can be run."""
        tokens, own, stock = real_tokens(self._batches), self._own, self._stock
        held = 0 if stock is None else stock.held_bytes()
        if own is not None:
            yield _Other("own", own.round, lambda: real_tokens(own.ran), self._other_bytes + held)
        if "floor" in self.case.modes:
            with self._without_adapters(session):
                floor = self._floor(session)
                yield _Other("floor", floor, lambda: tokens, self._own_bytes + held)
        for mode, step in () if stock is None else stock.steps(list(self._batches)):
            beside = self._own_bytes + stock.held_bytes(besides=mode)
            yield _Other(mode, step, lambda: tokens, beside)

    def _look(self, session: Any, run: Callable[[], Any], number: int) -> Any:
        """Lists the kernels of one more iteration, and of the other modes behind the last."""
        mode, file, answers = self._looks[number], self.case.kernels, []
        assert file is not None, "somebody asked for kernels"
        _compute_by_modules(mode == "flag_modules")
        self._table(mode, lambda: answers.append(run()))
        if number == len(self._looks) - 1:
            for other in self._others(session):
                self._table(other.mode, other.step)
            if self._own is not None:
                self._own.close()
        return answers[0]

    def _table(self, mode: str, run: Callable[[], object]) -> None:
        assert self.case.kernels is not None, "somebody asked for kernels"
        if is_main() and torch.cuda.is_available():
            kernel_table(run, f"{self.case.impl} {self.case.layout} {mode}", self.case.kernels)
        else:
            run()

    def _start(self, session: Any) -> None:
        """Watches which micro-batches the trainer gets, and makes our own trainer beside it."""
        feed = session.feed
        fill = feed.fill

        def watched(batches: Sequence[PackedBatch]) -> None:
            self._batches = list(batches)
            under_way = session.loop.super_model._micro_batches
            self._whole = [micro_batch.packed for micro_batch in under_way]
            fill(batches)

        feed.fill = watched
        if "own" in self.case.modes:
            before = self._other_bytes = allocated()
            self._own = OwnTrainer(session, self.case)
            self._own_bytes = allocated() - before
        if not {*STOCK}.isdisjoint(self.case.modes):
            self._stock = StockModes(session, self.case, lambda: self._batches)

    @contextmanager
    def _without_adapters(self, session: Any) -> Iterator[None]:
        """The trainer's modules run alone; the adapters are attached again behind it."""
        bank = session.loop.super_model.bank
        linears = [
            (module.tlora_adapters.site, module)
            for model in language_models(session.engine.chunks)
            for module in model.modules()
            if isinstance(module, MultiAdapter)
        ]
        attach(linears, AdapterBank(bank.sites, [], dtype=bank.dtype, device=bank.device))
        _compute_by_modules(True)
        yield
        attach(linears, bank)
        _compute_by_modules(False)

    def _floor(self, session: Any) -> Callable[[], None]:
        """Forward and input gradients of the trainer's model, on micro-batches that it has run."""
        engine, batches = session.engine, list(self._whole)
        config = language_models(engine.chunks)[0].config

        def run() -> None:
            timers, config.timers = config.timers, None
            get_forward_backward_func()(
                forward_step_func=engine.forward_step, data_iterator=iter(batches),
                model=engine.chunks, num_microbatches=len(batches), seq_length=engine.seq_length,
                micro_batch_size=1, forward_only=False,
            )  # fmt: skip
            engine.take_losses()
            config.timers = timers

        return run

    def _finish(self) -> None:
        """Writes the rows: medians over all iterations of a mode, of the slowest process."""
        medians = {}
        for mode, blocks in self._blocks.items():
            seconds = sorted(s for block in blocks for s in block.seconds)
            medians[mode] = largest([seconds[len(seconds) // 2]])[0]
        floor = medians.get("floor")
        common = {
            "gpu": gpu_name(),
            "megatron_lm": versions("megatron-core", "transformer-engine"),
            "floor_ms": "" if floor is None else round(floor * 1e3, 2),
        }
        rows = []
        for mode, blocks in self._blocks.items():
            measured = {
                "step_ms": round(medians[mode] * 1e3, 2),
                "tokens": round(sum(b.tokens for b in blocks) / len(blocks) / self.case.rounds),
                "peak_bytes": round(largest([float(max(b.peak_bytes for b in blocks))])[0]),
            }
            theirs = ""
            if self._stock is not None and mode in STOCK:
                theirs = f", Megatron-Bridge {self._stock.version}"
            shared = common | {"megatron_lm": common["megatron_lm"] + theirs}
            rows.append(make_row(self.case, mode, shared, measured))
        if is_main():
            Path(os.environ["TLORA_FLAG_ROWS"]).write_text(json.dumps(rows))


def real_tokens(batches: Sequence[PackedBatch]) -> int:
    """Rows of documents, padding not counted."""
    return sum(
        document.length
        for batch in batches
        for document in batch.view.documents
        if document.slot < batch.view.num_slots
    )


def _timed(run: Callable[[], object], rounds: int, tokens: Callable[[], int]) -> _Block:
    for _ in range(WARMUP):
        run()
    wait_for_all()
    _reset_peak()
    marks, total = Marks(on_gpu=torch.cuda.is_available()), 0
    marks.set()
    for _ in range(rounds):
        run()
        total += tokens()
        marks.set()
    return _Block(marks.seconds(), total, peak_bytes())


def _compute_by_modules(on: bool) -> None:
    """Has plain layers and the head run by Megatron's modules, as `TLORA_FLAG_COMPUTE` does."""
    PlainLayer.runs_now = (lambda layer, half: False) if on else _NOW  # type: ignore
    BuiltHead.runs = property(lambda self: False) if on else _RUNS  # type: ignore[method-assign]


_NOW, _RUNS = PlainLayer.runs_now, BuiltHead.runs


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _read_case() -> Case:
    document = json.loads(Path(os.environ["TLORA_FLAG_CASE"]).read_text())
    document["modes"] = tuple(document["modes"])
    for name in ("kernels", "bridge"):
        document[name] = Path(document[name]) if document[name] else None
    return Case(**{field.name: document[field.name] for field in fields(Case)})


def begin() -> Callable[[Any, Callable[[], Any]], Any]:
    """What stands between the trainer and the session in a life of the script."""
    return Turns().iteration
