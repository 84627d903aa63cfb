"""Ways to divide attention's backward pass into calls, which `determinism.attention` times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlora_megatron.ops.exactness import Exactness
from tlora_megatron.ops.frozen.attention_plan import Classes, classes_of, long_shape
from tlora_megatron.ops.frozen.exact_attention import NUM_STREAMS, backward_calls
from tlora_megatron.ops.frozen.packed_attention import CumulativeLengths, varlen_attention_vjp
from tlora_megatron.ops.host_copy import to_device

_EXACTNESS = Exactness()
Backward = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way; a field that is not given is as in a run."""

    name: str
    exactness: Exactness | None = _EXACTNESS
    """None = one call, with atomics."""
    streams: int = NUM_STREAMS
    long_parts: tuple[tuple[int, int], ...] = ()
    """Parts of a long document by number of heads."""

    def classes(self, heads: int, key_heads: int, multiprocessors: int) -> Classes:
        """Returns the classes of documents."""
        assert self.exactness is not None, f"{self.name} has none"
        short, long = self.exactness.short_document, self.exactness.long_document
        classes = classes_of(heads, key_heads, multiprocessors, short, long)
        parts = dict(self.long_parts).get(heads)
        if parts is None:
            return classes
        return classes._replace(long=long_shape(heads, key_heads, multiprocessors, parts))

    def lengths(
        self, documents: Sequence[int], rows: int, heads: tuple[int, int], device: torch.device
    ) -> CumulativeLengths:
        """Returns what the kernels are told of documents in the first of a number of rows."""
        padding = (rows - sum(documents),) if rows > sum(documents) else ()
        spans = (*documents, *padding)
        begins = to_device(torch.tensor((0, *spans)).cumsum(0).to(torch.int32), device)
        longest = max(2, *spans)
        if self.exactness is None:
            return CumulativeLengths(begins, begins, longest, longest)
        count = torch.cuda.get_device_properties(device).multi_processor_count
        is_padding = [False] * len(documents) + [True] * len(padding)
        classes = self.classes(*heads, count)
        calls = backward_calls(spans, is_padding, heads[0], classes, device, rows)
        calls = calls._replace(num_streams=self.streams)
        return CumulativeLengths(begins, begins, longest, longest, calls)

    def prepare(self, inputs: Sequence[Tensor], documents: Sequence[int]) -> tuple[Backward, int]:
        """Runs the forward pass; returns the backward pass and the number of its calls."""
        q, k, v = inputs
        heads = (q.shape[1], k.shape[1])
        lengths = self.lengths(documents, len(q), heads, q.device)
        _, backward = varlen_attention_vjp(q, k, v, lengths, q.shape[-1] ** -0.5)
        calls = lengths.backward_calls
        return backward, len(calls.calls) if calls else 1


DEFAULT = Variant(name="default", exactness=None)
PLAN = Variant(name="plan")
VARIANTS = (
    DEFAULT,
    Variant(
        name="whole heads",
        exactness=Exactness(short_document=4096),
        streams=1,
        long_parts=((32, 3), (16, 5)),
    ),
    PLAN,
    Variant(name="1 stream", streams=1),
    Variant(name="2 streams", streams=2),
    Variant(name="short to 512", exactness=Exactness(short_document=512)),
    Variant(name="short to 1536", exactness=Exactness(short_document=1536)),
    Variant(name="short to 2048", exactness=Exactness(short_document=2048)),
    Variant(name="middle to 1024", exactness=Exactness(long_document=1024)),
    Variant(name="middle to 4096", exactness=Exactness(long_document=4096)),
    Variant(name="long in 3 or 5", long_parts=((32, 3), (16, 5))),
)
"""`whole heads`: no document is divided by heads, calls follow one another, those of up to 2,048
tokens undivided."""
