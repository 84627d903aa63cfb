"""Checks that all processes of a run have read the same input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from tlora_megatron.config.schema import RunConfig
from tlora_megatron.training.data.tokenize import fingerprint
from tlora_megatron.training.preparation import PreparedJob


def check_agreement(config: RunConfig, prepared: Sequence[PreparedJob]) -> None:
    """Refuses processes that read different files: they would wait for each other for ever.

    Collective over the world.
    """
    steps = [(job.spec.name, job.checkpoint.step if job.checkpoint else 0) for job in prepared]
    everyone = _gather(steps)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"every process must start the same jobs at the same steps, got {theirs} on rank "
                f"{rank} and {everyone[0]} on rank 0; run.output_dir and the data must lie where "
                f"all nodes see them"
            )
    everyone = _gather(content_digest(config, prepared))
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ValueError(
                f"every process must read the same configuration and data, got others on rank "
                f"{rank} than on rank 0; they must lie where all nodes see them, or be copied anew"
            )


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def content_digest(config: RunConfig, prepared: Sequence[PreparedJob]) -> str:
    """Digest of everything that packing and updates follow from; paths may differ by node."""
    no_paths = {"data": None, "init_from": None, "resume_from": None}
    run = asdict(config.run) | {"output_dir": None}
    base = asdict(config.base_model) | {"path": None, "config": None}
    content: list[Any] = [run, base]
    for job in prepared:
        content += [asdict(job.spec) | no_paths]
        content += [job.data.fingerprint, fingerprint(job.data.eval)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
