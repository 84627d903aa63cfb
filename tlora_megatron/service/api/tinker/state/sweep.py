"""Deletes checkpoints whose time is over, and versions of weights that nobody samples from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlora_megatron.service.api.tinker.state.checkpoints import EPHEMERAL, Checkpoints, Saved
from tlora_megatron.service.api.tinker.state.sessions import Model
from tlora_megatron.service.sampling.sampler import InUse
from tlora_megatron.training.saving.writer import AdapterVersion

KEPT_FOR_SAMPLERS = 8
"""Weights that a model saved for one sampler alone, and versions that samplers hold while their
name leads elsewhere by now: so many of each, those that were used last."""
Used = Mapping[AdapterVersion, float]
"""Versions that samplers of open sessions sample from, and when they last did."""


def sweep(
    checkpoints: Checkpoints, model: Model, in_use: InUse, *, keep: int, is_over: bool
) -> None:
    """Deletes what has expired, and what was saved for samplers that are not there any more.

    Args:
        in_use: keeps versions with which something is drawn now.
        keep: weights for one sampler alone that stay.
        is_over: the model's job publishes nothing more.
    """
    # Names first: who pins a version notes that before he looks if its name has moved meanwhile.
    saved, versions = checkpoints.names(model), checkpoints.versions(model)
    used = checkpoints.versions_in_use() if versions else {}
    gone = [one for one in saved if one.facts.has_expired]
    gone += _unused([one for one in saved if one not in gone], keep, used)
    for one in gone:
        checkpoints.remove(one)
    named = {one.version for one in saved if one not in gone}
    newest = max((one.version for one in saved if one.version is not None), default=None)
    loose = [
        version
        for version in versions
        # A later one may have been written just now: its name comes next.
        if version not in named and (is_over or (newest is not None and version < newest))
    ]
    for version in _not_held(loose, used):
        in_use.remove(checkpoints.folder(version))


def _unused(saved: Sequence[Saved], keep: int, used: Used) -> list[Saved]:
    """Weights for one sampler alone but those that were made or used last."""

    def used_s(one: Saved) -> float:
        at_s = 0.0 if one.version is None else used.get(one.version, 0.0)
        return max(one.facts.created_at, at_s)

    alone = [one for one in saved if one.path.name.startswith(EPHEMERAL)]
    return sorted(alone, key=used_s)[: max(0, len(alone) - keep)]


def _not_held(loose: Sequence[AdapterVersion], used: Used) -> list[AdapterVersion]:
    """Versions but those that samplers have used last."""
    held = sorted((version for version in loose if version in used), key=used.__getitem__)
    kept = held[-KEPT_FOR_SAMPLERS:]
    return [version for version in loose if version not in kept]
