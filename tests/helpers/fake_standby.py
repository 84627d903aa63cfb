"""A spare process that becomes, or forks, a `fake_rank`; takes the arguments of the real one."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers import fake_rank
from tlora_megatron.service.mail.folder import GangFolder
from tlora_megatron.service.worker import rank, standby


def main(argv: list[str]) -> int:
    return fake_rank.main(GangFolder.at(Path(argv[0])), int(argv[1]))


if __name__ == "__main__":
    rank.main = main
    standby.serve_orders(forks="--forks" in sys.argv)
