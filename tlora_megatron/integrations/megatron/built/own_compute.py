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
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from torch import nn

from tlora_megatron.integrations.megatron.built.agreed_parts import AgreedParts
from tlora_megatron.integrations.megatron.built.head import BuiltHead, why_not_head
from tlora_megatron.integrations.megatron.built.model import language_models
from tlora_megatron.integrations.megatron.layer.conditions import (
    FP8,
    HALVES,
    LAYER,
    Half,
    halves_of,
    why_not_config,
    why_not_half,
)
from tlora_megatron.integrations.megatron.layer.modules import built_class
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    BuiltRotary,
    DocumentRotaryEmbedding,
)
from tlora_megatron.integrations.megatron.layer.plain_layer import LateReasons, make_plain
from tlora_megatron.layers.multi_adapter import make_multi_adapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.te_fp8 import why_not_fp8
from tlora_megatron.layers.transformer_engine import TEProductMixin, is_te_linear
from tlora_megatron.parallel.groups import ParallelGroups

logger = logging.getLogger(__name__)

VARIABLE = "TLORA_FLAG_COMPUTE"
_ASKED = ("own", "modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """Why parts of the model run by Megatron's modules."""

    layers: tuple[int, ...]
    """Numbers of decoder layers; empty for the head."""
    half: Half | Literal["head"] | None
    """The half that does, the other one being computed by our kernels; None = the whole layer."""
    reason: str
    times_step: float | None
    """Estimated step time over that by our kernels, if all layers (the head) run so; None where
    nothing is known."""

    def __str__(self) -> str:
        cost = "" if self.times_step is None else f", about {self.times_step:.2f}x the step"
        return f"{self._part} by Megatron's modules{cost}: {self.reason}"

    @property
    def _part(self) -> str:
        if self.half == "head":
            return "head"
        layers = f"layers {_spans(self.layers)}"
        if self.half is None:
            return layers
        own, other = ("attention", "MLP") if self.half == "mlp" else ("MLP", "attention")
        return f"{layers}: {own} by our kernels, {other}"


class _Counts(NamedTuple):
    """Numbers of decoder layers, by who computes them."""

    own: int
    halves: int
    """One half is ours."""
    modules: int

    def plus(self, other: _Counts) -> _Counts:
        return _Counts(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCompute:
    """The parts of the whole model that our kernels compute."""

    layers: _Counts
    reasons: tuple[WhyNot, ...]
    head: BuiltHead | None
    """The head of this process; None where its chunks have none, or the model's own runs."""
    late: LateReasons
    """Reasons that this process finds after the model was built."""
    parts: AgreedParts
    """Those that tensor-parallel ranks agree on, round by round."""

    @property
    def has_own_head(self) -> bool:
        """True if our kernels compute the head, on whichever stage it is."""
        return all(why.half != "head" for why in self.reasons)

    @property
    def line(self) -> str:
        """One line for the log."""
        head = "ours" if self.has_own_head else "Megatron's"
        own, halves, _ = self.layers
        line = f"base: {own} of {sum(self.layers)} layers by our kernels"
        line += f", {halves} in one half" if halves else ""
        return "; ".join([f"{line}, head by {head}", *map(str, self.reasons)])

    def summary(self) -> dict[str, Any]:
        """Plain values for `summary.json`."""
        return {
            "layers": self.layers._asdict(),
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

    Raises:
        ValueError: if `TLORA_FLAG_COMPUTE` is neither own nor modules, or not the same everywhere.
    """
    forced = f"{VARIABLE} is modules" if _agreed_choice() == "modules" else None
    models = language_models(chunks)
    late = LateReasons(logger.warning)
    counts, reasons = _Counts(0, 0, 0), []
    if forced is None and None in [why_not_config(models[0].config, LAYER, h) for h in HALVES]:
        for _, linear in linears:
            if is_te_linear(linear):  # gets a product of ours beside the one that it computes
                make_multi_adapter(linear, TEProductMixin)
    for model in models:
        found, why_not = _use_in_layers(model, forced, late)
        counts = counts.plus(found)
        reasons += why_not
    why_not = _why_not_head(models[-1], forced)
    reasons += why_not
    head = None
    if models[-1].post_process and not why_not:
        head = BuiltHead(models[-1], vocab_size, groups, late.add_head)
    parts = AgreedParts(models, head, groups)
    compute = OwnCompute(layers=counts, reasons=tuple(reasons), head=head, late=late, parts=parts)
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


def _use_in_layers(
    model: Any, forced: str | None, late: LateReasons
) -> tuple[_Counts, list[WhyNot]]:
    obstacles = _obstacles(model, forced)
    rotary = None
    if obstacles["attention"] is None:
        # Attention takes the factor from the config, whatever kind of embedding there is.
        factor = _yarn_get_concentration_factor_from_config(model.config)
        rotary = BuiltRotary(model.rotary_pos_emb, factor)
    counts = dict.fromkeys(_Counts._fields, 0)
    by_reason: dict[tuple[Half | None, str], list[int]] = {}
    for layer in model.decoder.layers:
        found = {half: obstacles[half] or why_not_half(layer, half) for half in halves_of(layer)}
        own = [half for half, reason in found.items() if reason is None]
        if own:
            make_plain(layer, own, rotary, late)
        left = [(half, reason) for half, reason in found.items() if reason is not None]
        if not found:
            left = [(HALVES[0], forced or f"a {built_class(layer).__name__} is another layer")]
        counts["halves" if own and left else "own" if own else "modules"] += 1
        for half, reason in left[:1]:
            key = half if own else None, reason
            by_reason.setdefault(key, []).append(layer.layer_number - 1)
    return _Counts(**counts), [
        WhyNot(layers=tuple(numbers), half=half, reason=reason, times_step=_times(model, half))
        for (half, reason), numbers in by_reason.items()
    ]


def _obstacles(model: Any, forced: str | None) -> dict[Half, str | None]:
    """Reasons, of the whole model, that keep halves of its layers with the modules."""
    config = model.config
    fp8 = None if forced else why_not_fp8_layers(config)  # which tries it out
    found = {half: forced or why_not_config(config, LAYER, half) or fp8 for half in HALVES}
    found["attention"] = found["attention"] or _why_not_rotary(model)
    return found


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
    if kind not in ("rope", "yarn") or not isinstance(rotary, DocumentRotaryEmbedding):
        return f"position_embedding_type is {kind}"
    return None


def _why_not_head(model: Any, forced: str | None) -> list[WhyNot]:
    reason = (forced or why_not_head(model)) if model.post_process else None
    # Logits, their fp32 copies and the loss of all rows: 14 ms of 460 on an H200 (8B).
    head = WhyNot(layers=(), half="head", reason=reason or "", times_step=1.03)
    return [] if reason is None else [head]


def _times(model: Any, half: Half | None) -> float | None:
    """Estimates from what was measured on an H200 at 8B shapes (results/flag_speed.csv).

    Args:
        half: that runs by modules; None = the whole layer.
    """
    config = model.config
    if config.params_dtype.itemsize != 2:
        return None
    is_te = any(is_te_linear(module) for module in model.decoder.modules())
    attention, mlp = (0.05, 0.07) if is_te else (0.035, 0.035)
    if not config.apply_rope_fusion:
        attention += 0.04
    if not config.bias_activation_fusion:
        mlp += 0.07
    parts = {"attention": attention, "mlp": mlp}
    return 1 + (sum(parts.values()) if half is None else parts[half])


def _whole_model(compute: OwnCompute, groups: ParallelGroups) -> OwnCompute:
    """Adds up the stages; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (groups.pp_rank, compute.layers, compute.reasons))
    stages = {stage: parts for stage, *parts in reversed(found)}
    counts = _Counts(0, 0, 0)
    merged: dict[tuple[str | None, str], WhyNot] = {}
    for layers, reasons in (stages[stage] for stage in sorted(stages)):
        counts = counts.plus(layers)
        for why in reasons:
            before = merged.get((why.half, why.reason))
            numbers = {*why.layers, *(before.layers if before else ())}
            merged[why.half, why.reason] = replace(why, layers=tuple(sorted(numbers)))
    return replace(compute, layers=counts, reasons=tuple(merged.values()))


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
