"""How many threads of the host a rank may use at once."""

from __future__ import annotations

import os


def host_threads(most: int) -> int:
    """Returns this rank's share of the cores it may run on: at least 1, and at most `most`.

    The ranks of a node share its cores (`LOCAL_WORLD_SIZE`, as torchrun sets it).
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks))
