"""Imports go down only, and in no circle: the contracts of import-linter in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S, imported, modules_in

LIGHT = (
    *("timeline", "files", "channel", "append_log", "config", "model", "page"),
    *("planner", "scheduler", "sim"),
)
"""Parts that import nothing of third parties but yaml when they are imported."""


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)


def test_imports_keep_the_contracts(repo: Path) -> None:
    done = _lint(repo)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ("ops/routing.py", "def late():\n    from tlora_megatron.layers import sites\n"),
        ("planner/hardware.py", "from tlora_megatron.ops import dropout\n"),
        ("training/loop.py", "import deepspeed\n"),
        ("layers/sites.py", "if TYPE_CHECKING:\n    from tlora_megatron.layers import shardings\n"),
    ],
    ids=["up, lazily", "another tower", "a trainer elsewhere", "a circle of types"],
)
def test_a_wrong_import_is_found(tmp_path: Path, repo: Path, file: str, wrong: str) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repo / "tlora_megatron", tmp_path / "tlora_megatron", ignore=ignored)
    shutil.copy(repo / "pyproject.toml", tmp_path)
    with (tmp_path / "tlora_megatron" / file).open("a") as module:
        module.write(wrong)
    done = _lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert Path(file).stem in done.stdout


def test_light_parts_need_no_third_party_but_yaml() -> None:
    names = [name for part in LIGHT for name in modules_in(part)]
    code = f"""
import importlib, sys
before = {{*sys.modules}}
for name in {names}: importlib.import_module(name)
new = {{*sys.modules}} - before
file_of = lambda name: str(getattr(sys.modules[name], "__file__", ""))
found = {{name.split(".")[0] for name in new if "-packages" in file_of(name)}}
assert found <= {{"yaml", "_yaml", "tlora_megatron"}}, found
"""
    imported(code)


def test_command_line_and_config_import_without_torch() -> None:
    heavy = ("torch", "megatron", "transformers", "numpy", "sqlalchemy", "ray")
    code = "import tlora_megatron.config, tlora_megatron.cli.main as line; line.build_parser()"
    assert not imported(code, *heavy)
