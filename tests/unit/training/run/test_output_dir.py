"""Two runs in one directory would mix their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_megatron.training.run.output_dir import hold_output_dir


def test_a_directory_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with (
        hold_output_dir(tmp_path),
        pytest.raises(ValueError, match=r"run.output_dir must not be in use, got .* another run"),
        hold_output_dir(tmp_path),
    ):
        pass
    with hold_output_dir(tmp_path):
        pass


def test_an_exception_lets_go(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside"), hold_output_dir(tmp_path):
        raise RuntimeError("inside")
    with hold_output_dir(tmp_path):
        pass
