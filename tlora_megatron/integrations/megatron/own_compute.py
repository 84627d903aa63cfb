"""Which parts of a built model our kernels compute, decided before training and told once.

Modules stay the owners of weights, names and checkpoints. What is not plain runs by them, with a
reason: in the log, in `summary.json` and so in `tlora inspect RUN`. With
`TLORA_FLAG_COMPUTE=modules` all runs by the modules.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from tlora_megatron.integrations.megatron.agreed_parts import AgreedParts
from tlora_megatron.integrations.megatron.built_head import BuiltHead, why_not_head
from tlora_megatron.integrations.megatron.built_model import language_models
from tlora_megatron.integrations.megatron.layer.built_parts import BuiltRotary
from tlora_megatron.integrations.megatron.layer.conditions import FP8, LAYER, why_not_config
from tlora_megatron.integrations.megatron.layer.plain_layer import (
    LateReasons,
    make_plain,
    why_not_plain,
)
from tlora_megatron.integrations.megatron.packed_attention import DocumentRotaryEmbedding
from tlora_megatron.layers.attach import make_multi_adapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.te_fp8 import why_not_fp8
from tlora_megatron.layers.te_linear import TEProductMixin, is_te_linear
from tlora_megatron.parallel.groups import ParallelGroups

logger = logging.getLogger(__name__)

VARIABLE = "TLORA_FLAG_COMPUTE"
_ASKED = ("own", "modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """Why parts of the model run by Megatron's modules."""

    layers: tuple[int, ...]
    """Numbers of decoder layers; empty for the head."""
    reason: str
    times_step: float | None
    """Estimated step time over that by our kernels, if all layers (the head) run so; None where
    nothing is known."""

    def __str__(self) -> str:
        part = f"layers {_spans(self.layers)}" if self.layers else "head"
        cost = "" if self.times_step is None else f", about {self.times_step:.2f}x the step"
        return f"{part} by Megatron's modules{cost}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCompute:
    """The parts of the whole model that our kernels compute."""

    num_own: int
    """Of the decoder's layers."""
    reasons: tuple[WhyNot, ...]
    head: BuiltHead | None
    """Of this process; None where its chunks have none, or the model's own runs."""
    late: LateReasons
    """Of this process."""
    parts: AgreedParts
    """Those that tensor-parallel ranks agree on, round by round."""

    @property
    def num_modules(self) -> int:
        """Number of layers that run by Megatron's modules."""
        return sum(len(why.layers) for why in self.reasons)

    @property
    def has_own_head(self) -> bool:
        """True if our kernels compute the head, on whichever stage it is."""
        return all(why.layers for why in self.reasons)

    @property
    def line(self) -> str:
        """One line for the log."""
        head = "ours" if self.has_own_head else "Megatron's"
        total = self.num_own + self.num_modules
        line = f"base: {self.num_own} of {total} layers by our kernels, head by {head}"
        return "; ".join([line, *map(str, self.reasons)])

    def summary(self) -> dict[str, Any]:
        """Plain values for `summary.json`."""
        return {
            "layers": {"own": self.num_own, "modules": self.num_modules},
            "head": "own" if self.has_own_head else "modules",
            "reasons": [*map(str, self.reasons), *self.late.found],
        }


def use_own_compute(
    chunks: Sequence[nn.Module],
    linears: Sequence[tuple[Site, nn.Module]],
    groups: ParallelGroups,
    vocab_size: int,
) -> OwnCompute:
    """Has our kernels compute what of a built, frozen model they can, in place.

    Call it behind `install_packed_attention` and before the linears get adapters. Collective over
    the world.

    Args:
        vocab_size: number of tokens; further columns of the logits are padding.

    Raises:
        ValueError: if `TLORA_FLAG_COMPUTE` is neither own nor modules, or not the same everywhere.
    """
    forced = f"{VARIABLE} is modules" if _agreed_choice() == "modules" else None
    models = language_models(chunks)
    late = LateReasons(logger.warning)
    num_own, reasons = 0, []
    if forced is None:
        _prepare_te_linears(models[0].config, linears)
    for model in models:
        found = _use_in_layers(model, forced, late)
        num_own += len(model.decoder.layers) - sum(len(why.layers) for why in found)
        reasons += found
    why_not = _why_not_head(models[-1], forced)
    reasons += why_not
    head = None
    if models[-1].post_process and not why_not:
        head = BuiltHead(models[-1], vocab_size, groups, late.add_head)
    parts = AgreedParts(models, head, groups)
    compute = OwnCompute(num_own=num_own, reasons=tuple(reasons), head=head, late=late, parts=parts)
    compute = _whole_model(compute, groups)
    if groups.is_writer:
        logger.info("%s", compute.line)
        _tell_of_scales(models[0].config)
    return compute


def _agreed_choice() -> str:
    """Returns the environment's choice; collective over the world, for ranks share a head."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.environ.get(VARIABLE) or "own")
    for asked in found:
        if asked not in _ASKED:
            raise ValueError(f"{VARIABLE} must be own or modules, got {asked}")
    if len(set(found)) > 1:
        raise ValueError(f"{VARIABLE} must be the same on all processes, got own and modules")
    return found[0]


def _prepare_te_linears(config: Any, linears: Sequence[tuple[Site, nn.Module]]) -> None:
    """Gives Transformer Engine's linears a product of ours, beside the one that they compute."""
    if why_not_config(config, LAYER) is None:
        for _, linear in linears:
            if is_te_linear(linear):
                make_multi_adapter(linear, TEProductMixin)


def _use_in_layers(model: Any, forced: str | None, late: LateReasons) -> list[WhyNot]:
    config = model.config
    obstacle = forced or why_not_config(config, LAYER) or why_not_fp8_layers(config)
    obstacle = obstacle or _why_not_rotary(model)
    rotary = None if obstacle else BuiltRotary(model.rotary_pos_emb)
    by_reason: dict[str, list[int]] = {}
    for layer in model.decoder.layers:
        reason = obstacle or why_not_plain(layer)
        if reason is not None:
            by_reason.setdefault(reason, []).append(layer.layer_number - 1)
        elif rotary is not None:
            make_plain(layer, rotary, late)
    times = _times_of_layers(model)
    return [
        WhyNot(layers=tuple(numbers), reason=reason, times_step=times)
        for reason, numbers in by_reason.items()
    ]


def why_not_fp8_layers(config: Any) -> str | None:
    """Returns why layers in FP8 must run by their modules; None if they need not, or are not."""
    if not config.fp8:
        return None
    repeats_mlp = config.recompute_granularity == "selective" and "mlp" in config.recompute_modules
    if repeats_mlp and _recipe(config) == "delayed":
        return "recompute of mlp with fp8_recipe delayed, whose scales Transformer Engine keeps"
    return why_not_config(config, FP8) or why_not_fp8(_recipe(config))


def _recipe(config: Any) -> str:
    return getattr(config.fp8_recipe, "value", config.fp8_recipe)


def _tell_of_scales(config: Any) -> None:
    """Says whose values decide how a job's rows are rounded to FP8."""
    if not config.fp8:
        return
    recipe = _recipe(config)
    if recipe in ("tensorwise", "delayed"):
        logger.info(
            "--fp8-recipe %s scales all rows by the largest value among them: a job's neighbours "
            "change how its own values are rounded. --fp8-recipe blockwise scales each row by "
            "itself",
            recipe,
        )
    else:
        logger.info("--fp8-recipe %s: no job changes how another's values are rounded", recipe)


def _why_not_rotary(model: Any) -> str | None:
    kind = model.position_embedding_type
    rotary = getattr(model, "rotary_pos_emb", None)
    if kind != "rope" or not isinstance(rotary, DocumentRotaryEmbedding):
        return f"position_embedding_type is {kind}"
    if 2 * rotary.inv_freq.numel() != model.config.kv_channels:
        return "heads are rotated in part"
    return None


def _why_not_head(model: Any, forced: str | None) -> list[WhyNot]:
    reason = (forced or why_not_head(model)) if model.post_process else None
    # Logits, their fp32 copies and the loss of all rows: 12 to 25 ms of 445 on an H200 (8B).
    return [] if reason is None else [WhyNot(layers=(), reason=reason, times_step=1.04)]


def _times_of_layers(model: Any) -> float | None:
    """Estimates from the kernels that modules launch beside ours: 8B shapes, H200, bf16."""
    config = model.config
    if config.fp8 or config.params_dtype.itemsize != 2:
        return None
    linears = {is_te_linear(module) for module in model.decoder.modules()}
    times = 1.08 if True in linears else 1.02
    if not config.bias_activation_fusion:
        times += 0.08
    return times if config.apply_rope_fusion else times + 0.04


def _whole_model(compute: OwnCompute, groups: ParallelGroups) -> OwnCompute:
    """Adds up the stages; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (groups.pp_rank, compute.num_own, compute.reasons))
    stages = {stage: parts for stage, *parts in reversed(found)}
    by_reason: dict[tuple[bool, str], WhyNot] = {}
    for _, reasons in (stages[stage] for stage in sorted(stages)):
        for why in reasons:
            key = (bool(why.layers), why.reason)
            layers = (*by_reason[key].layers, *why.layers) if key in by_reason else why.layers
            by_reason[key] = WhyNot(
                layers=tuple(sorted(layers)), reason=why.reason, times_step=why.times_step
            )
    num_own = sum(num_own for num_own, _ in stages.values())
    return replace(compute, num_own=num_own, reasons=tuple(by_reason.values()))


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
