"""Tries to enter a Ray cluster without a token.

    python -m tlora_megatron.service.engines.ray.probe_auth ADDRESS

Exit code 0: it is open to everybody. What it writes on stderr says when it was refused.
"""

from __future__ import annotations

import sys

import ray

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
