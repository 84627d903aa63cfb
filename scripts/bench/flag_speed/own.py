"""Our own trainer in the processes of a life, as the mode `own`."""

from __future__ import annotations

from functools import partial
from typing import Any

from scripts.bench.flag_speed.cases import Case
from scripts.bench.harness.training_jobs import fresh_job
from tlora_megatron.config.schema import EMBEDDING, HEAD
from tlora_megatron.integrations.megatron.nano_batches import NanoBatches
from tlora_megatron.layers.adapter_bank import AdapterBank
from tlora_megatron.layers.multi_adapter import attach
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.model.quantisation import quantised_on_reading
from tlora_megatron.profiling.synthetic_run import SyntheticRun
from tlora_megatron.training.nano.rounds import rank_aware_cut
from tlora_megatron.training.packing.packing import PackedBatch, RoundShape
from tlora_megatron.training.run.nano_setup import nano_settings
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
        settings = nano_settings(session._run.config.run, spec, dtype)
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
        """One round: packing, forward, backward, steps of jobs."""
        model = self._model
        self.ran = model.begin_round()
        model.end_round(model.engine.forward_backward(self.ran))

    def close(self) -> None:
        """Releases the collectives of its nano-batches; collective over the world."""
        self._model.engine.nano_batches.close()
