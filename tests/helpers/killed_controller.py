"""A controller with the local engine, as a process of its own that a test kills: ROOT SEATS."""

from __future__ import annotations

import sys
from pathlib import Path

from tlora_megatron.service.control.controller import serve
from tlora_megatron.service.control.settings import Settings
from tlora_megatron.service.engines.local.engine import LocalEngine

if __name__ == "__main__":
    root, seats = Path(sys.argv[1]), int(sys.argv[2])
    # One gang for all: each kill is of the controller of the same jobs.
    settings = Settings(policy="mlora", checkpoint_every_s=2.0)
    serve(root, LocalEngine(root, 0, seats=seats, standby=0), settings=settings, said=print)
