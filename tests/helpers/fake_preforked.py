"""A pre-forked worker that becomes, or forks, a `fake_rank`; its arguments are the real one's."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers import fake_rank
from tlora_megatron.service.messages import GangFolder
from tlora_megatron.service.worker import preforked, rank


def main(argv: list[str]) -> int:
    return fake_rank.main(GangFolder.at(Path(argv[0])), int(argv[1]))


if __name__ == "__main__":
    rank.main = main
    preforked.serve_orders(forks="--forks" in sys.argv)
