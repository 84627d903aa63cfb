"""scripts/test.sh, with a stand-in for the interpreter that runs its stages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

_INTERPRETER = """\
#!/usr/bin/env bash
case "$*" in
  *pytest*"$FAILS"*) exit 1 ;;
  *pytest*) echo $$ >>began; exec sleep "$SLEEPS" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, repo: Path) -> Path:
    """Two files of unit tests, so one for each half."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(repo / "scripts/test.sh", tmp_path / "scripts")
    for path, text in (
        (tmp_path / "interpreter", _INTERPRETER),
        (tmp_path / "scripts/setup_env.sh", f"#!/usr/bin/env bash\necho {tmp_path}/interpreter\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    for name in ("test_first.py", "test_second.py"):
        (tmp_path / "tests/unit").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests/unit" / name).touch()
    return tmp_path


def start(checkout: Path, *, fails: str = "none", sleeps: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(checkout / "scripts/test.sh"), "quick"],
        env=os.environ | {"FAILS": fails, "SLEEPS": str(sleeps)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Bash cannot trap what was ignored when it began.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ("none", None),
        ("test_first", "[tests/unit, one half]"),
        ("test_second", "[tests/unit, the other half]"),
    ],
)
def test_either_half_fails_the_whole(checkout: Path, fails: str, failed: str | None) -> None:
    process = start(checkout, fails=fails)
    output, _ = process.communicate(timeout=60)
    *_, last = output.splitlines()
    assert process.returncode == (failed is not None)
    assert last.endswith(f"s: {failed}") if failed else last.startswith("all stages passed")


def test_an_interrupt_ends_both_halves(checkout: Path) -> None:
    process, began = start(checkout, sleeps=60), checkout / "began"
    deadline = time.monotonic() + 30
    while not (began.exists() and len(began.read_text().split()) == 2):
        assert time.monotonic() < deadline, "both halves must begin"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    for pid in map(int, began.read_text().split()):
        _await_end(pid, deadline)


def _await_end(pid: int, deadline: float) -> None:
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, f"process {pid} must end"
        time.sleep(0.02)
