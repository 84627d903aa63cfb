"""Mixes of jobs by the lengths of their sequences: lognormals, a tail of documents, public sets.

The lognormals have means and spreads like the twelve sets of LobRA (PVLDB 18(8)), by the sets'
cards and from memory; they are not those sets.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Callable
from pathlib import Path

MEANS_AND_SPREADS = {
    "dolly": (207, 0.95),
    "python_code": (269, 0.5),
    "evol": (702, 0.45),
    "commitpack": (663, 1.0),
    "mathinstruct": (252, 0.6),
    "metamath": (236, 0.4),
    "numina": (543, 0.6),
    "pubmedqa": (371, 0.3),
    "xsum": (526, 0.7),
    "billsum": (3903, 0.9),
    "cnn": (947, 0.5),
    "meetingbank": (3622, 1.0),
}
LONGEST, FEWEST_ROWS, SEQUENCES = 16384, 16, 2048
BATCH = 64

Lengths = dict[str, list[int]]
"""Rows of the sequences of each job."""


def lognormals(seed: int = 0) -> Lengths:
    """Twelve jobs, cut at 16,384 rows."""
    draw = random.Random(seed)
    found = {}
    for name, (mean, spread) in MEANS_AND_SPREADS.items():
        middle = math.log(mean) - spread * spread / 2
        drawn = (int(draw.lognormvariate(middle, spread)) for _ in range(SEQUENCES))
        found[name] = [min(LONGEST, max(FEWEST_ROWS, rows)) for rows in drawn]
    return found


def with_documents(share: float, rows: int, seed: int = 0) -> Lengths:
    """The lognormals, of whose sequences so large a share are documents of so many rows."""
    every = round(1 / share)
    found = lognormals(seed)
    for number, lengths in enumerate(found.values()):
        for i in range(number % every, len(lengths), every):
            lengths[i] = rows
    return found


def public(path: Path) -> Lengths:
    """Sets of a CSV file (gzip) with the columns dataset, prompt_tokens, completion_tokens."""
    found: Lengths = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows = int(row["prompt_tokens"]) + int(row["completion_tokens"])
            found.setdefault(row["dataset"], []).append(max(2, rows))
    return found


def batches(lengths: list[int], seed: int) -> Callable[[int], list[int]]:
    """From the number of a batch to the rows of its sequences, in a shuffled order of the data."""
    order = random.Random(seed).sample(lengths, len(lengths))

    def batch(number: int) -> list[int]:
        return [order[(number * BATCH + i) % len(order)] for i in range(BATCH)]

    return batch
