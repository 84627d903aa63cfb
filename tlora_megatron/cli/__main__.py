"""Entry point of `tlora` and of `python -m tlora_megatron.cli`, which torchrun starts on ranks."""

from __future__ import annotations

from typing import NoReturn

from tlora_megatron.cli.main import main
from tlora_megatron.runtime.ranks import leave


def run() -> NoReturn:
    """Runs the command line of this process and ends it."""
    leave(main())


if __name__ == "__main__":
    run()
