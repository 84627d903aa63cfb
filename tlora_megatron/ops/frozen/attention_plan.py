"""Classes of documents for the exact backward pass of attention, and the calls they share.

FlashAttention-2's deterministic kernel starts n thread blocks for each pair of a document and a
head. Block j of them walks key blocks j, j + n, ... and adds queries' gradients into sum j of n,
which are added in order at the end. With all pairs of a call,

    n = ceil(multiprocessors / pairs)

decides the bits, so who shares a call would, too. Here a document's length alone decides its class,
and a class has one n: empty documents are appended until the formula gives it.

    class    the call                                                      n
    short    all neighbours of the class                                   1
    middle   neighbours of the class, as many as n lets in                 2 (32 heads)
    long     one document, divided by heads into several of the kernel's   that of fewest waves

A multiprocessor runs one block, so n * heads of a long document should just fill the GPU. Heads are
divided because few n can be had else: with documents of 32 heads n is 5, 3 or 2 on 132
multiprocessors; four documents of 8 heads and an empty one give 4, 128 blocks.

All is a function of a model's heads, of the GPU and of constants (`Exactness`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple


class CallShape(NamedTuple):
    """Calls of one class."""

    parts: int
    """n above."""
    heads: int
    """Query heads of a document of the kernel; a divisor of the model's."""
    fewest: int
    """Documents of the kernel, filled up with empty ones."""
    most: int
    """Documents of the micro-batch that may share a call."""


class Classes(NamedTuple):
    """Calls of a model's documents by length."""

    short_document: int
    """Tokens of the longest of its class."""
    long_document: int
    """Tokens of the longest middle one."""
    short: CallShape
    middle: CallShape
    long: CallShape

    def of(self, length: int) -> CallShape:
        """Returns the class of a document."""
        if length <= self.short_document:
            return self.short
        return self.middle if length <= self.long_document else self.long


class DocumentRun(NamedTuple):
    """Neighbouring documents that share a call."""

    begin: int
    """First row."""
    lengths: tuple[int, ...]
    shape: CallShape

    @property
    def end(self) -> int:
        """Row behind the last."""
        return self.begin + sum(self.lengths)

    @property
    def block_work(self) -> float:
        """Work of the thread block that takes longest, in squared tokens."""
        return max(self.lengths) ** 2 / self.shape.parts


def num_parts(pairs: int, multiprocessors: int) -> int:
    """Returns the kernel's n for the pairs of documents and heads of a call."""
    return -(-multiprocessors // pairs)


@functools.cache
def classes_of(
    heads: int, key_heads: int, multiprocessors: int, short_document: int, long_document: int
) -> Classes:
    """Returns the classes of a model.

    The fewer heads, the more a document is divided: four of the middle class's longest, or four of
    the short one's, should fill the GPU, as two nano-batches of 8,192 rows have no more. With many
    heads nothing below a long one needs it.
    """
    parts = max(multiprocessors // (4 * heads), min(2, 2 * multiprocessors // (3 * heads)))
    return Classes(
        short_document=min(short_document, short_document * heads // 32, long_document),
        long_document=long_document,
        short=undivided(heads, multiprocessors),
        middle=middle_shape(heads, multiprocessors, parts),
        long=long_shape(heads, key_heads, multiprocessors),
    )


def undivided(heads: int, multiprocessors: int) -> CallShape:
    """Returns the shape with one part, for any number of documents."""
    return CallShape(1, heads, -(-multiprocessors // heads), 1 << 30)


def middle_shape(heads: int, multiprocessors: int, parts: int) -> CallShape:
    """Returns the shape with most parts, up to a number, for documents with all their heads."""
    for n in range(parts, 1, -1):
        fewest = -(-multiprocessors // (n * heads))
        most = (multiprocessors - 1) // ((n - 1) * heads)
        if fewest <= most:
            return CallShape(n, heads, fewest, most)
    return undivided(heads, multiprocessors)


def long_shape(heads: int, key_heads: int, multiprocessors: int) -> CallShape:
    """Returns the shape in which a long document's blocks end first: that of fewest waves.

    Among these it has the fewest parts, as each costs memory.
    """
    shapes = [
        shape
        for n in range(1, num_parts(heads, multiprocessors) + 1)
        for shape in _long_shapes(n, heads, heads // key_heads, multiprocessors)
    ]

    def time(shape: CallShape) -> tuple[float, int, int]:
        waves = -(-shape.parts * heads // multiprocessors)
        return waves / shape.parts, shape.parts, shape.fewest

    return min(shapes, key=time)


def _long_shapes(parts: int, heads: int, ratio: int, multiprocessors: int) -> list[CallShape]:
    """Shapes of one document with some n; a document of the kernel has whole groups or one's."""
    shapes = []
    for own in range(1, heads + 1):
        if heads % own or (own % ratio and ratio % own):
            continue
        documents = max(heads // own, -(-multiprocessors // (parts * own)))
        if num_parts(documents * own, multiprocessors) == parts:
            shapes.append(CallShape(parts, own, documents, 1))
    return shapes


def document_runs(
    lengths: Sequence[int], is_padding: Sequence[bool], class_of: Callable[[int], CallShape]
) -> tuple[DocumentRun, ...]:
    """Divides a micro-batch's documents into calls; padding, whose gradients are 0, is in none."""
    runs: list[DocumentRun] = []
    begin, is_open = 0, False
    for length, skipped in zip(lengths, is_padding, strict=True):
        if not skipped:
            shape = class_of(length)
            last = runs[-1] if is_open else None
            if last and last.shape == shape and len(last.lengths) < shape.most:
                runs[-1] = last._replace(lengths=(*last.lengths, length))
            else:
                runs.append(DocumentRun(begin, (length,), shape))
        is_open = not skipped
        begin += length
    return tuple(runs)


def rows_of_none(runs: Sequence[DocumentRun], rows: int) -> tuple[tuple[int, int], ...]:
    """Returns begins and ends of the rows that no run has; runs in any order."""
    gaps, at = [], 0
    for run in sorted(runs):
        if at < run.begin:
            gaps.append((at, run.begin))
        at = run.end
    return (*gaps, (at, rows)) if at < rows else tuple(gaps)
