"""The streams and collectives with which a model runs its nano-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tlora_megatron.ops.routing import MicroBatchView
from tlora_megatron.parallel.nano.lanes import Lane
from tlora_megatron.parallel.nano.side_stream import SideStream, make_side_stream
from tlora_megatron.parallel.transport.tensor_collectives import TensorCollectives


class Overlap:
    """The number of nano-batches of a model, and the streams and collectives that they run with.

    Args:
        num_nano_batches: parts of a micro-batch, at most; may be set between rounds.
    """

    def __init__(
        self, num_nano_batches: int, collectives: TensorCollectives, device: torch.device
    ) -> None:
        self.num_nano_batches = num_nano_batches
        self.collectives = collectives
        self._device = device
        self._streams: list[SideStream] = []

    def streams(self, count: int) -> list[SideStream]:
        """Returns one side stream for each nano-batch, the same every time."""
        if len(self._streams) < count:
            self.collectives.prepare(count)
        while len(self._streams) < count:
            self._streams.append(make_side_stream(self._device))
        return self._streams[:count]

    def lanes(self, views: Sequence[MicroBatchView], *, gathers: bool) -> list[Lane]:
        """Returns a lane for each nano-batch of one micro-batch."""
        streams = self.streams(len(views))
        return [
            Lane(index, view, self.collectives, stream, gathers=gathers)
            for index, (view, stream) in enumerate(zip(views, streams, strict=True))
        ]
