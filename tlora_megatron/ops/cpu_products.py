"""Keeps the rows of a CPU's matrix products apart."""

from __future__ import annotations

import os


def keep_rows_apart() -> None:
    """Has oneDNN leave AMX alone; call it before the first matrix product of a process.

    On CPUs with AMX, products of 16-bit types over an odd inner size read one value of the next row
    and multiply it by 0 (torch 2.13): a NaN of one job's row reaches another job's. What the user
    has set stays.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
