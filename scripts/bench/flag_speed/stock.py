"""One LoRA job trained as Megatron-Bridge (and with it NeMo) trains one, in the trainer's process.

Adapters, their places and their frozen base are made by a Megatron-Bridge checkout's own
`megatron.bridge.peft`: a branch of two parallel linears beside each linear, by autograd. The model
is a GPTModel of the trainer's own layer spec over the trainer's own weights; DDP, gradients and
optimizer are megatron-core's, as in Bridge's recipe for Llama 3.1 8B. Core attention is ours in
both: Transformer Engine's does not run with every cuDNN. All rows have logits, as they do there.
Left out, in its favour: packing, learning rate schedule, checks for NaN, logging.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from scripts.bench.flag_speed.cases import ONE_JOB, ONE_LORA, STOCK, Case
from scripts.bench.harness.clock import allocated, is_main, largest, say
from tlora_megatron.config.job import JobSpec
from tlora_megatron.integrations.megatron.built.model import (
    install_packed_attention,
    language_models,
)
from tlora_megatron.layers.slab import initial_factor
from tlora_megatron.model.spec import ModelSpec
from tlora_megatron.ops.routing import pack_micro_batch, use_micro_batch
from tlora_megatron.training.packing.packing import PackedBatch, round_up


def load_bridge(source: Path) -> str:
    """Makes `megatron.bridge.peft` importable; returns Megatron-Bridge's version.

    `megatron.bridge` itself would import its models, and with them half of its requirements: it
    becomes an empty package. Of its utilities, the adapters need a print.
    """
    os.environ["NO_VCS_VERSION"] = "1"  # or it asks the git of another repository
    package = _module("megatron.bridge")
    package.__path__ = [str(source / "megatron" / "bridge")]
    _module("megatron.bridge.utils.common_utils").print_rank_0 = (  # type: ignore[attr-defined]
        lambda text: print(text) if is_main() else None
    )
    absent = not importlib.util.find_spec("transformer_engine")
    if absent:  # it is imported for the class of one annotation
        engine = _module("transformer_engine.pytorch")
        engine.ops = SimpleNamespace(Sequential=object)  # type: ignore[attr-defined]
        _module("transformer_engine").pytorch = engine  # type: ignore[attr-defined]
    importlib.import_module("megatron.bridge.peft.lora")
    if absent:
        del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
        # It takes the names that megatron-core then has for classes.
        sys.modules["megatron.bridge.peft.utils"].HAVE_TE = False  # type: ignore[attr-defined]
    return str(importlib.import_module("megatron.bridge.package_info").__version__)


def _module(name: str) -> ModuleType:
    sys.modules[name] = module = ModuleType(name)
    return module


def cut_by_job(batch: PackedBatch, *, multiple: int) -> list[PackedBatch]:
    """Returns each job's rows as a micro-batch of one adapter, in multiples of so many rows."""
    parts, begin = [], 0
    for slot, group in itertools.groupby(batch.view.documents, lambda document: document.slot):
        if slot == batch.view.num_slots:
            break  # padding
        documents = [replace(document, slot=0) for document in group]
        length = sum(document.length for document in documents)
        rows, size = slice(begin, begin + length), round_up(length, multiple)
        begin += length
        view = pack_micro_batch(
            documents, num_slots=1, num_tokens=size, dropout_keys=(), cp_rank=0, cp_size=1
        )
        tokens_T, labels_T, weights_T = (
            F.pad(values[rows], (0, size - length))
            for values in (batch.tokens[0], batch.labels[0], batch.weights)
        )
        values = {"tokens": tokens_T.unsqueeze(0), "labels": labels_T.unsqueeze(0)}
        targets = torch.nonzero(weights_T).flatten()
        parts.append(PackedBatch(view=view, weights=weights_T, target_rows=targets, **values))
    return parts


_CHECKED = 3
"""Steps whose losses are held against the flag's; the flag's first blocks have them."""
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative difference of those losses, by the base's dtype."""
_ROWS = 16
"""Divides the rows of a job alone: what FP8's GEMMs and sequence parallelism ask for."""
_ENGINE = importlib.util.find_spec("transformer_engine") is not None
_FUSED_LOSS: dict[str, Any] = {
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "te" if _ENGINE else "native",
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "stock_peft": {"cross_entropy_loss_fusion": False},
    "stock_fused_loss": _FUSED_LOSS,
    "stock_in_turn": _FUSED_LOSS,
    "stock_op_fuser": _FUSED_LOSS | {"use_transformer_engine_op_fuser": True},
}
"""Changes of the model's configuration; the first has those of Bridge's recipe."""


class StockModes:
    """The stock modes of a life, which are checked once and then take their turns.

    Args:
        session: the flag's, before its first iteration.
        batches: returns the micro-batches that the trainer was given last.
    """

    def __init__(
        self, session: Any, case: Case, batches: Callable[[], Sequence[PackedBatch]]
    ) -> None:
        self._modes = [mode for mode in case.modes if mode in STOCK]
        self._trainers: dict[str, StockTrainer] = {}
        self._first: list[tuple[list[PackedBatch], torch.Tensor]] = []
        """First steps of the flag's one job, and their losses."""
        if not self._modes:
            return
        assert case.bridge is not None, "the command line asks for it"
        self.version = load_bridge(case.bridge)
        self._make = partial(StockTrainer, session)
        self._takes_steps = case.jobs == ONE_JOB
        engine = session.engine
        take = engine.take_losses

        def watched() -> list[torch.Tensor]:
            losses = take()
            if len(self._first) < _CHECKED:
                whole = torch.stack([losses_T.sum() for losses_T in losses]).sum()
                self._first.append((list(batches()), whole))
            return losses

        engine.take_losses = watched

    def steps(self, batches: list[PackedBatch]) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yields each mode and its step over the batches; those that are wrong are left out."""
        for mode in list(self._modes):
            if mode not in self._trainers and not self._start(mode):
                self._modes.remove(mode)
                continue
            step = self._trainers[mode].step
            if mode == "stock_in_turn":
                parts = [[part] for batch in batches for part in cut_by_job(batch, multiple=_ROWS)]
                yield mode, lambda step=step, parts=parts: [step(part) for part in parts]
            else:
                yield mode, partial(step, batches)

    def held_bytes(self, besides: str = "") -> int:
        """Memory of the trainers' adapters and optimizers, but for one mode's."""
        return sum(t.held_bytes for mode, t in self._trainers.items() if mode != besides)

    def _start(self, mode: str) -> bool:
        """Makes a mode's trainer, and holds its first losses against the flag's."""
        try:
            trainer = self._make(_SETTINGS[mode])
            found = [trainer.step(its) for its, _ in self._first]
        except Exception as error:  # the other modes' rows are worth having
            say(f"stock: {mode} does not run: {type(error).__name__}: {error}")
            return False
        self._trainers[mode] = trainer
        pairs = zip(found, self._first, strict=True)
        errors = [abs(a.item() - b.item()) / abs(b.item()) for a, (_, b) in pairs]
        if not self._takes_steps:
            return True
        limit = _TOLERANCES[trainer.dtype]
        is_right = largest([max(errors)])[0] <= limit
        shown = ", ".join(f"{loss.item():.6f}" for loss in found)
        say(
            f"stock: {mode} has losses {shown}, {max(errors):.1e} from the flag's"
            f"{'' if is_right else f', must be within {limit:.0e}'}"
        )
        return is_right


class StockTrainer:
    """A GPTModel with Bridge's adapters of rank 16, in DDP, with megatron-core's optimizer."""

    def __init__(self, session: Any, settings: dict[str, Any]) -> None:
        before = allocated()
        theirs = language_models(session.engine.chunks)[0]
        job: JobSpec = session.loop.super_model.jobs[0].spec
        settings = dict(settings)
        fuses = settings.pop("use_transformer_engine_op_fuser", False)
        model = _model_over(theirs, settings)
        config = model.config
        # Read where a linear is wrapped; built with it, the MLP would be another module.
        config.use_transformer_engine_op_fuser = fuses
        lora = importlib.import_module("megatron.bridge.peft.lora")
        targets = list(ONE_LORA["target_modules"])
        lora.LoRA(target_modules=targets, dim=ONE_LORA["rank"], alpha=ONE_LORA["alpha"])(model)
        config.use_transformer_engine_op_fuser = False
        _copy_first_factors(model, session._run.spec, job)
        self.dtype = config.params_dtype
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=config.bf16)
        self._model = DistributedDataParallel(config, ddp_config, model)
        self._optimizer: Any = get_megatron_optimizer(
            _optimizer_config(job, config), [self._model], use_gloo_process_groups=False
        )
        config.grad_scale_func = self._optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        self._positions: Callable[[PackedBatch], torch.Tensor] = partial(
            PackedBatch.positions, device=session.engine.groups.device
        )
        self._seq_length = session.engine.seq_length
        self.held_bytes = allocated() - before

    def step(self, batches: list[PackedBatch]) -> torch.Tensor:
        """One training step; returns the mean loss of its targets, without waiting for it."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        outs = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=iter(batches), model=[self._model],
            num_microbatches=len(batches), seq_length=self._seq_length, micro_batch_size=1,
            forward_only=False,
        )  # fmt: skip
        self._optimizer.step()
        loss, tokens = torch.stack([out["loss"] for out in outs]).sum(0)
        return loss / tokens

    def _forward(
        self, batches: Iterator[PackedBatch], model: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch = next(batches)
        with use_micro_batch(batch.view):
            losses = model(batch.tokens, self._positions(batch), None, labels=batch.labels)
        return losses, partial(_masked_loss, batch)


def _masked_loss(batch: PackedBatch, losses: torch.Tensor) -> tuple[Any, ...]:
    """Bridge's `masked_next_token_loss`: a sum, which the number of targets divides later."""
    mask_T = (batch.weights > 0).float()
    loss, tokens = torch.sum(losses.view(-1).float() * mask_T), mask_T.sum()
    return loss, tokens.int(), {"loss": torch.stack([loss.detach(), tokens])}


def _model_over(theirs: Any, settings: dict[str, Any]) -> Any:
    """Builds a GPTModel as the trainer's, over the same memory for its weights."""
    config = copy.copy(theirs.config)
    plain = {
        "timers": None, "no_sync_func": None, "grad_sync_func": None, "param_sync_func": None,
        "perform_initialization": False, "calculate_per_token_loss": True,
    }  # fmt: skip
    for name, value in (plain | settings).items():
        setattr(config, name, value)
    model: Any = GPTModel(
        config, theirs.transformer_layer_spec, theirs.vocab_size, theirs.max_sequence_length,
        share_embeddings_and_output_weights=theirs.share_embeddings_and_output_weights,
        position_embedding_type=theirs.position_embedding_type,
        rotary_percent=theirs.rotary_percent, rotary_base=theirs.rotary_base,
    )  # fmt: skip
    weights = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.data = weights.pop(name).data
    assert not weights, f"weights without a place: {list(weights)}"
    install_packed_attention([model])
    model.rotary_pos_emb.inv_freq = theirs.rotary_pos_emb.inv_freq
    return model


def _copy_first_factors(model: Any, spec: ModelSpec, job: JobSpec) -> None:
    """Gives each adapter the A that the flag's job begins with; B is zero in both."""
    for name, module in model.named_modules():
        place = re.search(r"layers\.(\d+)\.\w+\.(linear_\w+)\.adapter$", name)
        if place is None or place[2] not in job.lora.target_modules:
            continue
        whole = initial_factor(spec, f"layers.{place[1]}.{place[2]}.lora_a", job.lora, job.seed)
        weight = module.linear_in.weight
        dim = 1 if module.input_is_parallel else 0
        shards = whole.chunk(whole.shape[dim] // weight.shape[dim], dim)
        with torch.no_grad():
            weight.copy_(shards[torch.distributed.get_rank(module.tp_group)])


def _optimizer_config(job: JobSpec, config: Any) -> OptimizerConfig:
    ours = job.optimizer
    return OptimizerConfig(
        optimizer="adam", lr=ours.lr, weight_decay=ours.weight_decay, adam_beta1=ours.betas[0],
        adam_beta2=ours.betas[1], adam_eps=ours.eps, clip_grad=ours.max_grad_norm,
        bf16=config.bf16, params_dtype=config.params_dtype, use_distributed_optimizer=False,
    )  # fmt: skip
