"""A nano-batch's own CUDA stream beside the main one.

Memory: what is allocated on one stream and read on the other must not be given out again too early.
Every to-and-fro waits for all the other stream was given, so a tensor made on the side and read on
main is safe by itself: the side stream's next work waits for main. A tensor made on main and read
on the side must be given to `hold`: main continues without waiting.

CUDA_DEVICE_MAX_CONNECTIONS must not be 1: the GPU would start kernels in launch order over all
streams, and a norm that waits for its collective would hold up every GEMM behind it.
"""

from __future__ import annotations

import torch

_PRIORITY = -1
"""Above what main mostly runs, so that a norm or a copy goes before the next kernel's blocks, but
not above the fused GEMM (`kPriority` of lora_gemm.cuh): between two of its clusters a norm of
thousands of blocks would hold the last ones up until the others have done their tiles."""


class SideStream:
    """The side stream of a CPU: work runs in the order of the code, so there is nothing to do."""

    def begin(self) -> None:
        """Remembers the current stream as the main one."""

    def to_side(self) -> None:
        """Continues on this stream, after all that main has been given."""

    def resume(self) -> None:
        """Continues on this stream; main must have been given nothing for it since."""

    def to_main(self) -> None:
        """Continues on main, after all that this stream was given; releases held tensors."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor of main's alive until main has waited for its readers here."""

    def leave(self) -> None:
        """Makes main the current stream without waiting, after an error too."""


class CudaSideStream(SideStream):
    """A stream beside main; the device waits, by events, never the host."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device, priority=_PRIORITY)
        self._main = torch.cuda.current_stream(device)
        # A wait takes the event as it was recorded last, so one for each direction will do.
        self._main_reached, self._side_reached = torch.cuda.Event(), torch.cuda.Event()
        self._held: list[torch.Tensor] = []

    def begin(self) -> None:
        self._main = torch.cuda.current_stream(self._side.device)

    def to_side(self) -> None:
        self._main_reached.record(self._main)
        self._side.wait_event(self._main_reached)
        torch.cuda.set_stream(self._side)

    def resume(self) -> None:
        torch.cuda.set_stream(self._side)

    def to_main(self) -> None:
        self._side_reached.record(self._side)
        self._main.wait_event(self._side_reached)
        torch.cuda.set_stream(self._main)
        self._held.clear()

    def hold(self, tensor: torch.Tensor) -> None:
        self._held.append(tensor)

    def leave(self) -> None:
        torch.cuda.set_stream(self._main)


def make_side_stream(device: torch.device) -> SideStream:
    """Returns a side stream for a device."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()
