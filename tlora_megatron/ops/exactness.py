"""Constants and products that make a row's bits depend on the row, its document and its job alone.

The `Exactness` value travels with the micro-batch, as the routing does (`ops.routing`); where there
is none, every op takes its fastest path. docs/determinism.md lists what each constant is for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Exactness:
    """Sizes that decide the order of a sum, equal for all runs: a job that moves keeps its bits."""

    row_budget: int = 8192
    """In the place of the run's own (`RowGroups.row_budget`)."""
    multiprocessors: int = 132
    """Multiprocessors that sums over rows are divided for, whatever the GPU has: those of an H100
    and an H200."""
    head_rows: int = 1024
    """Rows of logits that are computed at a time, whatever the micro-batch has."""
    short_document: int = 1024
    """Documents of up to so many tokens share backward calls of attention in which a document's key
    blocks are not divided; with fewer than 32 heads so much shorter ones."""
    long_document: int = 2048
    """Documents of more tokens have a backward call of attention to themselves, in which key blocks
    are divided among all multiprocessors; those between the two constants are divided in two, with
    fewer than 32 heads in more."""


def exactness_of(deterministic: bool) -> Exactness | None:
    """Returns the value for a run; None where nothing is promised and nothing is paid."""
    return Exactness() if deterministic else None


def keep_rows_apart() -> None:
    """Has oneDNN leave AMX alone; call it before the first matrix product of a process.

    On CPUs with AMX, products of 16-bit types over an odd inner size read one value of the next row
    and multiply it by 0 (torch 2.13): a NaN of one job's row reaches another job's. What the user
    has set stays.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
