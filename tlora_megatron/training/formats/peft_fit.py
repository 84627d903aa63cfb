"""Takes an adapter that was read from files as the first factors of a job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tlora_megatron.config.job import EXPERT_TARGETS, JobSpec, LoraSpec
from tlora_megatron.layers.slab import split_name
from tlora_megatron.training.formats.peft import AdapterFile
from tlora_megatron.training.formats.peft_config import FUSED_PARTS, hf_targets
from tlora_megatron.training.formats.peft_experts import common_matrix


def fit_to_job(adapter: AdapterFile, job: JobSpec) -> dict[str, Tensor]:
    """Returns the adapter's factors under the job's targets; the job may change only the dropout.

    A job with Megatron targets takes q/k/v (gate/up) factors that share one A, as those exported
    here do; with an A of their own they do not fit into one fused adapter of the same rank. A job
    whose experts share factors takes those that are the same for all of them.

    Raises:
        ValueError: if rank, scaling or targets differ, or factors that are to be one are unequal.
    """
    where, ours, theirs = f"job {job.name!r}: init_from adapter", job.lora, adapter.lora
    wanted = hf_targets(ours.target_modules)
    for target in wanted:
        rank, given = ours.rank_of(target), theirs.rank_of(target)
        if given != rank:
            what = "expert_rank" if target in EXPERT_TARGETS else "rank"
            raise ValueError(f"{where}'s {what} must be the job's {rank}, got {given}")
    if theirs.num_blocks != ours.num_blocks:
        raise ValueError(
            f"{where}'s num_blocks must be the job's {ours.num_blocks}, got {theirs.num_blocks} "
            f"(1 is a standard adapter)"
        )
    if not math.isclose(theirs.scaling, ours.scaling, rel_tol=1e-6):
        raise ValueError(
            f"{where}'s scaling must be the job's {_scaling_text(ours)}, "
            f"got {_scaling_text(theirs)}"
        )
    if set(theirs.target_modules) != set(wanted):
        raise ValueError(
            f"{where}'s target_modules must be the job's {', '.join(wanted)}, "
            f"got {', '.join(theirs.target_modules)}"
        )
    num_layers = len(adapter.factors) // (2 * len(wanted))
    factors = {}
    for layer in range(num_layers):
        for target in ours.target_modules:
            joined = _join(adapter.factors, layer, target, where)
            for which, factor in zip(("lora_a", "lora_b"), joined, strict=True):
                name = f"layers.{layer}.{target}.{which}"
                shared = ours.is_shared(target, which)
                factors[name] = common_matrix(factor, f"{where}'s {name}") if shared else factor
    return factors


def shared_by_experts(adapter: AdapterFile, where: str) -> AdapterFile:
    """Returns an adapter whose experts share the outer factors, each of them once.

    Args:
        where: the adapter's folder, for errors.

    Raises:
        ValueError: if it is not on routed experts, or they have unequal ones.
    """
    lora = replace(adapter.lora, expert_sharing="outer")
    if not lora.expert_targets:
        raise ValueError(
            f"adapter {where} must have factors on routed experts, got "
            f"{', '.join(lora.target_modules)}"
        )
    factors = {}
    for name, factor in adapter.factors.items():
        _, target, which = split_name(name)
        shared = lora.is_shared(target, which)
        factors[name] = common_matrix(factor, f"adapter {where}: {name}") if shared else factor
    return replace(adapter, lora=lora, factors=factors)


def _join(
    factors: Mapping[str, Tensor], layer: int, target: str, where: str
) -> tuple[Tensor, Tensor]:
    """A and B of one target of one layer; a fused one's B rows are its parts' in order."""
    parts = FUSED_PARTS.get(target, (target,))
    first = factors[f"layers.{layer}.{parts[0]}.lora_a"]
    for part in parts[1:]:
        if not torch.equal(first, factors[f"layers.{layer}.{part}.lora_a"]):
            raise ValueError(
                f"{where}'s {', '.join(parts)} must share one A to become {target}, "
                f"got an A of its own for {part} in layer {layer}; "
                f"use target_modules: [{', '.join(parts)}]"
            )
    rows = [factors[f"layers.{layer}.{part}.lora_b"] for part in parts]
    return first, torch.cat(rows, dim=-2)


def _scaling_text(lora: LoraSpec) -> str:
    root = "sqrt(rank)" if lora.use_rslora else "rank"
    return f"{lora.scaling:g} (alpha {lora.alpha:g} / {root} {lora.rank})"
