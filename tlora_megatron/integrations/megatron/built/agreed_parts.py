"""Has all tensor-parallel ranks compute a part by our kernels, or all of them by its modules.

The two exchange different tensors in the head and around Transformer Engine's linears, so ranks
that went different ways would wait for each other for ever; a hook on the modules of one rank is
enough for that. So ranks tell each other before every round which parts may run by the kernels now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tlora_megatron.integrations.megatron.built.head import BuiltHead
from tlora_megatron.integrations.megatron.layer.conditions import HALVES, Half
from tlora_megatron.integrations.megatron.layer.modules import does_more
from tlora_megatron.integrations.megatron.layer.plain_layer import PlainLayer
from tlora_megatron.parallel.groups import ParallelGroups


class _Part(NamedTuple):
    """Half a layer, a final norm or a head."""

    may_run: Callable[[], bool]
    """Tells if this rank could compute it by our kernels now."""
    set_agreed: Callable[[bool], None]


class AgreedParts:
    """Asks all tensor-parallel ranks which parts of the model may run by our kernels in a round.

    It is one all-reduce of a byte a part over gloo, begun before a round is packed and read behind
    that. Hooks that come later in a round count from the next on. Without tensor parallelism
    nobody is asked, and hooks count at once. Making one is collective over the world.

    Args:
        models: of this rank, as many layers as on the other tensor-parallel ranks.
        head: None = the stage has none, or the model's own runs.
    """

    def __init__(
        self, models: Sequence[Any], head: BuiltHead | None, groups: ParallelGroups
    ) -> None:
        self._group: dist.ProcessGroup | None = None
        if groups.layout.tp_size == 1:
            return
        self._parts = [part for model in models for part in _parts_of(model.decoder)]
        of_head = _NEVER
        if head is not None:
            of_head = _Part(lambda: head.may_run, lambda agreed: setattr(head, "agreed", agreed))
        self._parts.append(of_head)
        self._votes = torch.empty(0)
        self._work: dist.Work | None = None
        self._group = _make_gloo_group(groups.tp_group)

    def begin(self) -> None:
        """Tells the other ranks what may run here; collective, but does not wait."""
        if self._group is not None:
            votes = [part.may_run() for part in self._parts]
            self._votes = torch.tensor(votes, dtype=torch.uint8, device="cpu")
            self._work = dist.all_reduce(self._votes, dist.ReduceOp.MIN, self._group, async_op=True)

    def end(self) -> None:
        """Waits for the others; parts then run as all may, until the next `end`."""
        if self._group is not None:
            assert self._work is not None, "begin comes before end"
            self._work.wait()
            self._work = None
            for part, agreed in zip(self._parts, self._votes.tolist(), strict=True):
                part.set_agreed(bool(agreed))

    def close(self) -> None:
        """Gives the group up; a second call does nothing."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def norm_runs(decoder: Any) -> bool:
    """Returns True if the norm behind a decoder's layers may be computed by our kernels."""
    agreed = decoder.__dict__.get("tlora_norm_runs")
    return _norm_may_run(decoder) if agreed is None else agreed


def _norm_may_run(decoder: Any) -> bool:
    norm = getattr(decoder, "final_layernorm", None)
    return norm is None or not does_more(norm)


def _parts_of(decoder: Any) -> list[_Part]:
    halves = [_half_part(layer, half) for layer in decoder.layers for half in HALVES]

    def set_norm(agreed: bool) -> None:
        decoder.__dict__["tlora_norm_runs"] = agreed

    return [*halves, _Part(lambda: _norm_may_run(decoder), set_norm)]


def _half_part(layer: Any, half: Half) -> _Part:
    if not isinstance(layer, PlainLayer) or half not in layer.tlora_parts:
        return _NEVER

    def set_half(agreed: bool) -> None:
        layer.tlora_agreed[half] = agreed

    return _Part(lambda: layer.may_run(half), set_half)


_NEVER = _Part(lambda: False, lambda _: None)


def _make_gloo_group(tp_group: dist.ProcessGroup) -> Any:
    """Makes a group of the same ranks for the host; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(dist.get_process_group_ranks(tp_group)))
    groups = [list(ranks) for ranks in sorted(set(found))]
    group, _ = dist.new_subgroups_by_enumeration(groups, backend="gloo")
    return group
