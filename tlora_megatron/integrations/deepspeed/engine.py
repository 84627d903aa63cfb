"""Runs packed micro-batches through a frozen Hugging Face model under DeepSpeed, to jobs' losses.

The output layer computes losses. The model calls it as before, so that ZeRO-3's hooks gather its
weight; while a batch is being scored it returns losses in the place of logits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

from tlora_megatron.config.schema import BaseModelSpec
from tlora_megatron.integrations.deepspeed import model as models
from tlora_megatron.integrations.deepspeed.config import DeepSpeedConfig
from tlora_megatron.integrations.deepspeed.discover import (
    has_experts,
    model_spec,
    prepare_linears,
    sharded_spec,
    weight_shape,
)
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.slab import StatePlacement
from tlora_megatron.layers.vocabulary_head import VocabularyHead
from tlora_megatron.model.backbone import LinearsSpec
from tlora_megatron.model.layout import ParallelLayout
from tlora_megatron.ops.exactness import keep_rows_apart
from tlora_megatron.ops.routing import use_micro_batch
from tlora_megatron.parallel.groups import ParallelGroups
from tlora_megatron.training.data.tokenize import TokenSequence
from tlora_megatron.training.nano.rounds import NanoSwitch
from tlora_megatron.training.packing.isolation import ROUNDING, check_isolation, usual_difference
from tlora_megatron.training.packing.packing import Item, PackedBatch, Placed, pack
from tlora_megatron.training.run.fingerprint import check_base_of_run
from tlora_megatron.training.run.training_run import DTYPES

_current: tuple[PackedBatch, bool] | None = None
"""The batch that the running forward scores, and if it predicts."""


@contextmanager
def score(batch: PackedBatch, *, predict: bool = False) -> Iterator[None]:
    """Makes the model called inside return losses `[1, T]` as its logits.

    With `predict`, fp32 `[1, 2, T]`: losses, and 1 where the label is the first choice.
    """
    global _current
    _current = batch, predict
    try:
        yield
    finally:
        _current = None


class ScoringMixin:
    """Overrides the forward of an output layer."""

    tlora_groups: ParallelGroups
    tlora_vocab_size: int

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits, or losses while a batch is scored."""
        if _current is None:
            return super().forward(hidden)  # type: ignore[misc]
        batch, predict = _current
        head = VocabularyHead(self, self.tlora_vocab_size, self.tlora_groups)
        rows_n, labels_T = batch.target_rows, batch.labels[0]
        if not predict:
            return head.losses(hidden, rows_n, labels_T, batch.view.exactness)[None]
        losses_T, right_T = head.score(hidden, rows_n, labels_T, batch.view.exactness)
        return torch.stack([losses_T, right_T.float()])[None]


def prepare_output_layer(model: Any, vocab_size: int, groups: ParallelGroups) -> None:
    """Makes the model's output layer able to score, in place; a second call does nothing.

    Raises:
        ValueError: if tensor parallelism cut the vocabulary into unequal parts.
    """
    head: Any = model.get_output_embeddings()
    if isinstance(head, ScoringMixin):
        return
    rows = weight_shape(head)[0]
    if rows == vocab_size:  # whole on every rank
        groups = replace(groups, tp_rank=0, layout=replace(groups.layout, tp_size=1))
    elif rows * groups.layout.tp_size != vocab_size:
        raise ValueError(
            f"the vocabulary must be a multiple of autotp_size {groups.layout.tp_size}, "
            f"got {vocab_size}"
        )
    base: type[nn.Module] = type(head)
    head.__class__ = type(f"Scoring{base.__name__}", (ScoringMixin, base), {"__module__": __name__})
    object.__setattr__(head, "tlora_groups", groups)
    object.__setattr__(head, "tlora_vocab_size", vocab_size)


_PROBE_LENGTHS = (9, 22)


class DeepSpeedEngine:
    """`training.super_model.Engine` over a model that DeepSpeed has sharded.

    A micro-batch is bound through its backward too, so that recomputed layers find it.

    Args:
        model: DeepSpeed's hooks are set on it; called directly, since DeepSpeed's own engine would
            look for an optimizer in backward.
    """

    nano_batches: NanoSwitch | None = None

    def __init__(self, model: Any, groups: ParallelGroups) -> None:
        self.model = model
        self.groups = groups

    def forward_backward(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Accumulates gradients in the bank; returns weighted losses; see `Engine`."""
        self.model.train()
        return [self._train_step(batch) for batch in batches]

    def predict(self, batches: Sequence[PackedBatch]) -> list[tuple[Tensor, Tensor]]:
        """Scores the batches without gradients; see `Scorer`."""
        self.model.eval()
        with torch.no_grad():
            return [self._predict_step(batch) for batch in batches]

    def _train_step(self, batch: PackedBatch) -> Tensor:
        with use_micro_batch(batch.view):
            with score(batch):
                losses_T = self._run(batch)[0] * batch.weights
            losses_T.sum().backward()
        return losses_T.detach()

    def _predict_step(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        with use_micro_batch(batch.view), score(batch, predict=True):
            losses_T, right_T = self._run(batch)[0]
        return losses_T * batch.weights, right_T > 0

    def _run(self, batch: PackedBatch) -> Tensor:
        positions = batch.view.positions(self.groups.device).unsqueeze(0)
        out = self.model(input_ids=batch.tokens, position_ids=positions, use_cache=False)
        return out.logits


def check_packing(model: Any, spec: LinearsSpec, groups: ParallelGroups, plain: str) -> None:
    """Refuses a model that mixes packed documents, or scores them otherwise than each alone.

    The first is exact (`check_isolation`). The second is found if positions do not restart, or
    logits are scaled behind the output layer, but not below rounding, which another shape brings.
    Collective over the world; call it before adapters are attached.

    Args:
        plain: name of the attention implementation that the model came with.
    """
    engine, dtype = DeepSpeedEngine(model, groups), next(model.parameters()).dtype
    check_isolation(
        engine.forward_backward,
        [model.get_input_embeddings()],
        groups,
        name=type(model).__name__,
        dtype=dtype,
        has_experts=has_experts(model),
        vocab_size=spec.vocab_size,
        longest=spec.max_positions,
    )
    error = _packing_error(engine, spec, plain)
    if not error <= ROUNDING[dtype]:
        raise ValueError(
            f"{type(model).__name__} must score packed documents as it does each alone, got losses "
            f"that differ by {error:.1e} of their size: it is not supported"
        )


def _packing_error(engine: DeepSpeedEngine, spec: LinearsSpec, plain: str) -> float:
    """Returns how far losses of packed documents are from those of each alone, relative."""
    model, device = engine.model, engine.groups.device
    documents = [(torch.arange(n) * 7 + n) % spec.vocab_size for n in _PROBE_LENGTHS]
    placed = [
        Placed(0, Item(TokenSequence(d.numpy(), (d >= 0).numpy()), i, 0, 1.0))
        for i, d in enumerate(documents)
    ]
    batch = pack(
        placed, num_tokens=32, num_slots=1, dropout_keys=(), cp_rank=0, cp_size=1,
        device=device,
    )  # fmt: skip
    losses_T, _ = engine.predict([batch])[0]
    model.set_attn_implementation(plain)
    try:
        expected = torch.cat([_losses_alone(model, d.to(device)) for d in documents])
    finally:
        model.set_attn_implementation(models.NAME)
    found = losses_T[batch.target_rows]
    if has_experts(model):
        return usual_difference(found, expected)
    return float((found - expected).norm() / expected.norm())


def _losses_alone(model: Any, tokens: Tensor) -> Tensor:
    """Losses of all tokens but the first, from the unchanged model, fp32 `[n - 1]`."""
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    return F.cross_entropy(logits.float(), tokens[1:], reduction="none")


def join_processes() -> None:
    """Joins the process group of the launcher's environment, or a world of one without a launcher.

    NCCL where there is CUDA, else gloo. A process group that is there already is kept.
    """
    cuda = torch.cuda.is_available()
    if not cuda:
        keep_rows_apart()
        # Compiled in the first process group on every CPU, for inference alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)


def current_groups(tp_size: int) -> ParallelGroups:
    """Returns this process's place in the groups that DeepSpeed has made."""
    world = dist.get_world_size()
    layout = ParallelLayout(tp_size=tp_size).for_world(world)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if tp_size > 1:
        tp_group = deepspeed_groups.get_tensor_model_parallel_group()
        dp_group = deepspeed_groups.get_data_parallel_group()
    else:
        # Every process makes all of these groups.
        tp_group = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
        dp_group = dist.group.WORLD
    return ParallelGroups(
        layout=layout,
        tp_rank=dist.get_rank(tp_group),
        pp_rank=0,
        cp_rank=0,
        dp_rank=dist.get_rank(dp_group),
        tp_group=tp_group,
        dp_cp_group=dp_group,
        model_group=tp_group,
        device=device,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenBase:
    """A frozen model, sharded by DeepSpeed and ready for adapters."""

    model: Any
    deepspeed: Any
    """DeepSpeed's engine around the model."""
    spec: LinearsSpec
    groups: ParallelGroups
    linears: tuple[tuple[Site, nn.Module], ...]
    engine: DeepSpeedEngine
    placement: StatePlacement
    """Place of the adapters' master weights and moments, by the ZeRO stage."""


def base_of_model(model: Any) -> BaseModelSpec:
    """Describes a model that the caller has built, like the section `base_model`.

    Raises:
        ValueError: if its weights are neither fp32 nor bf16.
    """
    dtypes = {p.dtype for p in model.parameters()}
    names: list[Any] = [name for name, dtype in DTYPES.items() if dtypes == {dtype}]
    if not names:
        raise ValueError(f"the model's weights must be all float32 or all bfloat16, got {dtypes}")
    return BaseModelSpec(path=model.name_or_path or None, dtype=names[0])


def check_run_over_experts(model: Any, config: DeepSpeedConfig) -> None:
    """Refuses settings that a model with routed experts cannot keep; others pass."""
    if not has_experts(model):
        return
    if config.tp_size > 1:
        raise ValueError(
            "tensor_parallel.autotp_size must be 1 over a base with routed experts, which AutoTP "
            f"does not cut as we need it, got {config.tp_size}"
        )
    if config.run.run.deterministic:
        raise ValueError(
            "run.deterministic must be false over a base with routed experts: an expert's rows "
            "come in any number, which moves the last bits, got True"
        )


def build_base(config: DeepSpeedConfig, model: Any | None = None) -> FrozenBase:
    """Reads the base, unless it is given, and puts it under DeepSpeed; collective."""
    tp_size = config.tp_size
    if dist.get_world_size() % tp_size:
        raise ValueError(
            f"tensor_parallel.autotp_size must divide the {dist.get_world_size()} processes, "
            f"got {tp_size}"
        )
    is_given = model is not None
    if model is None:
        model = models.load_model(config.run.base_model, config.engine, tp_size=tp_size)
    models.refuse_adapters(model)
    check_run_over_experts(model, config)
    models.turn_dropout_off(model)
    whole_spec = model_spec(model)
    plain = model.config._attn_implementation
    deepspeed = models.start_engine(model, config.engine)
    models.check_finite(model)
    groups = current_groups(tp_size)
    spec = sharded_spec(model, whole_spec, groups)
    models.require_grad_from_embedding(model)
    models.use_packed_attention(model)
    prepare_output_layer(model, spec.vocab_size, groups)
    check_packing(model, spec, groups, plain)
    if not is_given:  # a program's own model may differ from its folder
        check_base_of_run(DeepSpeedEngine(model, groups), groups, config.run)
    if config.run.run.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return FrozenBase(
        model=model,
        deepspeed=deepspeed,
        spec=spec,
        groups=groups,
        linears=prepare_linears(model, spec, groups),
        engine=DeepSpeedEngine(model, groups),
        placement=StatePlacement.over_replicas(
            groups, shards=config.stage > 0, on_cpu=config.offload_optimizer
        ),
    )
