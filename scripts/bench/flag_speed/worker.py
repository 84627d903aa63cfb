"""One rank of a life of the script: `worker.py pretrain_gpt.py ARGS`.

`turns.Turns` stands between the trainer and the session, and measures.
"""

from __future__ import annotations

import sys

import torch

# Here already: a checkout has a folder `scripts` too.
from scripts.bench.flag_speed.watched import Iteration, launch_watched


def _begin() -> Iteration:
    from scripts.bench.flag_speed.turns import Turns

    return Turns().iteration


if __name__ == "__main__":
    launch_watched([*([] if torch.cuda.is_available() else ["--cpu"]), *sys.argv[1:]], _begin)
