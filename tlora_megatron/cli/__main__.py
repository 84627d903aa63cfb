"""Entry point of `python -m tlora_megatron.cli`, which torchrun starts on every rank."""

import sys

from tlora_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
