"""How every engine starts a rank: the command, and the environment that it begins with."""

from __future__ import annotations

import os
import sys

RANK_COMMAND = (sys.executable, "-m", "tlora_megatron.service.worker.rank")
"""Behind it come the gang's folder and the rank."""
HOST_VARIABLE = "TLORA_GANG_HOST"
"""Tells rank 0 its own address for the others, where a gang spans several nodes."""
_OF_OTHER_WORLDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "GROUP_")


def inherited_environment() -> dict[str, str]:
    """This process's environment without what a launcher of other processes has left there."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHER_WORLDS)
    }
