"""A process that builds a backbone prints nothing of Megatron's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.launch import HANG_S


def test_building_a_backbone_prints_nothing(repo: Path) -> None:
    code = """
from tlora_megatron.integrations.megatron import imports
imports.quieten()
import torch
from tests.helpers.linear_case import SPEC
from tlora_megatron.integrations.megatron import engine, model
from tlora_megatron.model.layout import ParallelLayout
layout = ParallelLayout(tp_size=1, pp_size=1, cp_size=1, dp_size=1, sequence_parallel=False)
model.initialize_parallel(layout)
model.build_backbone(SPEC, layout, dtype=torch.float32)
"""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "PYTHONWARNINGS")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repo,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
