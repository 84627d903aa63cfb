"""The folder of a service as an older version has left it."""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.helpers.launch import REPO
from tlora_megatron.service.home import Home

SESSION = "sd826a7c8c8827b88a1c45a3d"
"""Ann's, which goes on: two models, three samplers, and a model without a job."""
ENDED = "s5ee7fc5b5143e78083bae5db"
"""Bob's, which has ended with its model."""
MADE_IN = "/tmp/b9"
"""The checkout of that commit, where its base model was."""


def unpack_b9fb101e(folder: Path) -> Home:
    """Unpacks what `tlora serve` of commit b9fb101e wrote for two clients of the `tinker` SDK.

    It was stopped by Ctrl-C. A gang of one process had trained; what nobody reads any more was left
    out: the gang's folder, logs, and older checkpoints.
    """
    with tarfile.open(REPO / "tests/fixtures/service_of_b9fb101e.tar.xz") as packed:
        packed.extractall(folder, filter="tar")
    home = Home.open(folder / "service")
    bases = home.root / "bases.json"
    bases.write_text(bases.read_text().replace(MADE_IN, str(REPO)))
    return home
