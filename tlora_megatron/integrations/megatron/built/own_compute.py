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

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from torch import nn

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
from tlora_megatron.integrations.megatron.layer.modules import built_class, does_more
from tlora_megatron.integrations.megatron.layer.norm_and_rotary import (
    BuiltRotary,
    DocumentRotaryEmbedding,
)
from tlora_megatron.integrations.megatron.layer.plain_layer import (
    LateReasons,
    PlainHalf,
    make_plain,
)
from tlora_megatron.layers.multi_adapter import make_multi_adapter
from tlora_megatron.layers.sites import Site
from tlora_megatron.layers.transformer_engine import TEProductMixin, is_te_linear, why_not_fp8
from tlora_megatron.parallel.groups import ParallelGroups

logger = logging.getLogger(__name__)

VARIABLE = "TLORA_FLAG_COMPUTE"


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
        part = "head" if self.half == "head" else f"layers {_spans(self.layers)}"
        if self.half in HALVES:
            own, other = ("attention", "MLP") if self.half == "mlp" else ("MLP", "attention")
            part += f": {own} by our kernels, {other}"
        cost = "" if self.times_step is None else f", about {self.times_step:.2f}x the step"
        return f"{part} by Megatron's modules{cost}: {self.reason}"


class _Counts(NamedTuple):
    """Numbers of decoder layers, by who computes them."""

    own: int
    halves: int
    """One half is ours."""
    modules: int


class AgreedParts:
    """Has all tensor-parallel ranks compute a part by our kernels, or all of them by its modules.

    The two exchange different tensors in the head and around Transformer Engine's linears, so ranks
    that went different ways would wait for each other for ever; a hook on the modules of one rank
    is enough for that. So ranks tell each other before every round which parts may run by the
    kernels now: in one all-reduce of a byte a part over gloo, begun before a round is packed and
    read behind that. Hooks that come later in a round count from the next on. Without tensor
    parallelism nobody is asked, and hooks count at once. Making one is collective over the world.

    Args:
        models: of this rank, as many layers as on the other tensor-parallel ranks.
        head: None = the stage has none, or the model's own runs.
    """

    def __init__(
        self, models: Sequence[Any], head: BuiltHead | None, groups: ParallelGroups
    ) -> None:
        self._group: Any = None
        if groups.layout.tp_size == 1:
            return
        decoders = [model.decoder for model in models]
        layers = [layer for decoder in decoders for layer in decoder.layers]
        self._parts: list[PlainHalf | BuiltHead | None] = [head]
        self._parts += [getattr(x, "tlora_parts", {}).get(half) for x in layers for half in HALVES]
        norms = (getattr(decoder, "final_layernorm", None) for decoder in decoders)
        self._norms = [norm for norm in norms if norm is not None]
        self._votes = torch.empty(0)
        self._work: dist.Work | None = None
        tp_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tp_ranks, tuple(dist.get_process_group_ranks(groups.tp_group)))
        rows = [list(ranks) for ranks in sorted(set(tp_ranks))]
        self._group, _ = dist.new_subgroups_by_enumeration(rows, backend="gloo")

    def begin(self) -> None:
        """Tells the other ranks what may run here; collective, but does not wait."""
        if self._group is not None:
            votes = [part is not None and part.may_run for part in self._parts]
            votes += [not does_more(norm) for norm in self._norms]
            self._votes = torch.tensor(votes, dtype=torch.uint8, device="cpu")
            self._work = dist.all_reduce(self._votes, dist.ReduceOp.MIN, self._group, async_op=True)

    def end(self) -> None:
        """Waits for the others; parts then run as all may, until the next `end`."""
        if self._group is not None:
            assert self._work is not None, "begin comes before end"
            self._work.wait()
            self._work = None
            of_parts, of_norms = self._votes.bool().split([len(self._parts), len(self._norms)])
            for part, runs in zip(self._parts, of_parts.tolist(), strict=True):
                if part is not None:
                    part.agreed = runs
            for norm, runs in zip(self._norms, of_norms.tolist(), strict=True):
                norm.__dict__["tlora_agreed"] = runs

    def close(self) -> None:
        """Gives the group up; a second call does nothing."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCompute:
    """The parts of the whole model that our kernels compute."""

    num_layers: int
    reasons: tuple[WhyNot, ...]
    head: BuiltHead | None
    """The head of this process; None where its chunks have none, or the model's own runs."""
    late: LateReasons
    """Reasons that this process finds after the model was built."""
    parts: AgreedParts
    """Those that tensor-parallel ranks agree on, round by round."""

    @property
    def layers(self) -> _Counts:
        """Who computes the layers."""
        halves = sum(len(why.layers) for why in self.reasons if why.half in HALVES)
        modules = sum(len(why.layers) for why in self.reasons if why.half is None)
        return _Counts(self.num_layers - halves - modules, halves, modules)

    @property
    def has_own_head(self) -> bool:
        """True if our kernels compute the head, on whichever stage it is."""
        return all(why.half != "head" for why in self.reasons)

    @property
    def line(self) -> str:
        """One line for the log."""
        head = "ours" if self.has_own_head else "Megatron's"
        own, halves, _ = self.layers
        line = f"base: {own} of {self.num_layers} layers by our kernels"
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
    if forced is None and None in [why_not_config(models[0].config, LAYER, h) for h in HALVES]:
        for _, linear in linears:
            if is_te_linear(linear):  # gets a product of ours beside the one that it computes
                make_multi_adapter(linear, TEProductMixin)
    reasons = [why for model in models for why in _use_in_layers(model, forced, late)]
    why_not = _why_not_head(models[-1], forced)
    head = None
    if models[-1].post_process and not why_not:
        head = BuiltHead(models[-1], vocab_size, groups, late.add_head)
    parts = AgreedParts(models, head, groups)
    num_layers = sum(len(model.decoder.layers) for model in models)
    total, merged = _of_all_stages(num_layers, reasons + why_not, groups)
    compute = OwnCompute(num_layers=total, reasons=merged, head=head, late=late, parts=parts)
    if groups.is_writer:
        logger.info("%s", compute.line)
        _tell_of_scales(models[0].config)
    return compute


def _agreed_choice() -> str:
    """Returns the environment's choice; collective over the world, for ranks share a head."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.environ.get(VARIABLE) or "own")
    for asked in found:
        if asked not in ("own", "modules"):
            raise ValueError(f"{VARIABLE} must be own or modules, got {asked}")
    if len(set(found)) > 1:
        raise ValueError(f"{VARIABLE} must be the same on all processes, got own and modules")
    return found[0]


def _use_in_layers(model: Any, forced: str | None, late: LateReasons) -> list[WhyNot]:
    """Has our kernels compute what they can; returns a reason for each layer that is left."""
    obstacles = _obstacles(model, forced)
    rotary = None
    if obstacles["attention"] is None:
        # Attention takes the factor from the config, whatever kind of embedding there is.
        factor = _yarn_get_concentration_factor_from_config(model.config)
        rotary = BuiltRotary(model.rotary_pos_emb, factor)
    reasons = []
    for layer in model.decoder.layers:
        found = {half: obstacles[half] or why_not_half(layer, half) for half in halves_of(layer)}
        own = [half for half, reason in found.items() if reason is None]
        if own:
            make_plain(layer, own, rotary, late)
        left = [(half, reason) for half, reason in found.items() if reason is not None]
        if not found:
            left = [(HALVES[0], forced or f"a {built_class(layer).__name__} is another layer")]
        for half, reason in left[:1]:
            which, number = half if own else None, layer.layer_number - 1
            times = _times(model, which)
            reasons.append(WhyNot(layers=(number,), half=which, reason=reason, times_step=times))
    return reasons


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


def _of_all_stages(
    num_layers: int, reasons: Sequence[WhyNot], groups: ParallelGroups
) -> tuple[int, tuple[WhyNot, ...]]:
    """Adds up layers and joins reasons that are alike; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (groups.pp_rank, num_layers, reasons))
    stages = {stage: parts for stage, *parts in reversed(found)}
    merged: dict[tuple[str | None, str], WhyNot] = {}
    for why in (why for stage in sorted(stages) for why in stages[stage][1]):
        before = merged.get((why.half, why.reason))
        numbers = {*why.layers, *(before.layers if before else ())}
        merged[why.half, why.reason] = replace(why, layers=tuple(sorted(numbers)))
    return sum(count for count, _ in stages.values()), tuple(merged.values())


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as `0-3, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
