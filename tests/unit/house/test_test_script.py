"""scripts/test.sh, with a stand-in for the interpreter that runs its stages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launch import HANG_S

_INTERPRETER = """\
#!/usr/bin/env bash
echo "$*" >>commands
echo "${TLORA_ALL_TESTS:-0} ${PYTHONDONTWRITEBYTECODE:-0}" >>told
case "$*" in
  *"$FAILS"*) exit "$STATUS" ;;
  *pytest*) echo $$ >>began; exec sleep "$SLEEPS" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path, repo: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(repo / "scripts/test.sh", tmp_path / "scripts")
    for path, text in (
        (tmp_path / "interpreter", _INTERPRETER),
        (tmp_path / "scripts/setup_env.sh", f"#!/usr/bin/env bash\necho {tmp_path}/interpreter\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def start(
    checkout: Path, *words: str, fails: str = "none", status: int = 1, sleeps: int = 0
) -> subprocess.Popen[str]:
    changes = {"FAILS": fails, "STATUS": str(status), "SLEEPS": str(sleeps)}
    return subprocess.Popen(
        ["bash", str(checkout / "scripts/test.sh"), *words],
        env=os.environ | changes,
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
        ("ruff check", "[ruff check]"),
        ("mypy", "[mypy]"),
        ("pytest", "[tests/unit]"),
    ],
)
def test_any_stage_fails_the_whole(checkout: Path, fails: str, failed: str | None) -> None:
    process = start(checkout, "quick", fails=fails)
    output, _ = process.communicate(timeout=HANG_S)
    *_, last = output.splitlines()
    assert process.returncode == (failed is not None)
    assert last.endswith(f"s: {failed}") if failed else last.startswith("all stages passed")
    assert "pytest" in (checkout / "commands").read_text(), "every stage runs"


def test_finding_no_test_is_a_failure_unless_some_were_selected(checkout: Path) -> None:
    whole, some = (
        start(checkout, *words, fails="pytest", status=5) for words in ((), ("-k", "nothing"))
    )
    for process in (whole, some):
        process.communicate(timeout=HANG_S)
    assert (whole.returncode, some.returncode) == (1, 0)


def test_quick_runs_the_fast_unit_tests_only(checkout: Path) -> None:
    for words in (("quick", "-x"), ()):
        start(checkout, *words).communicate(timeout=HANG_S)
    quick, whole, *_ = (
        line for line in (checkout / "commands").read_text().splitlines() if "pytest" in line
    )
    assert quick.endswith(" tests/unit -x -m not slow")
    assert whole.endswith(" tests/unit tests/distributed tests/integration")


@pytest.mark.parametrize(("word", "told"), [("quick", "0 0"), ("all", "1 0")])
def test_all_asks_for_further_combinations(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, word: str, told: str
) -> None:
    monkeypatch.delenv("TLORA_ALL_TESTS", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    start(checkout, word).communicate(timeout=HANG_S)
    assert set((checkout / "told").read_text().splitlines()) == {told}


def test_an_interrupt_ends_the_tests(checkout: Path) -> None:
    process, began = start(checkout, "quick", sleeps=600), checkout / "began"
    end_s = time.monotonic() + HANG_S
    while not (began.exists() and began.read_text().split()):
        assert time.monotonic() < end_s, "the tests must begin"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    (pid,) = map(int, began.read_text().split())
    command = Path(f"/proc/{pid}/cmdline")
    while command.exists() and command.read_bytes():
        assert time.monotonic() < end_s, f"process {pid} must end"
        time.sleep(0.02)


def test_the_process_that_shares_out_the_tests_imports_no_torch(repo: Path) -> None:
    """It reads these files before its workers start, and nothing of the rest."""
    code = """
import sys
import tests.conftest, tests.distributed.conftest, tests.integration.conftest, tests.unit.conftest
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=repo, check=True, timeout=HANG_S)


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ((), "-m scripts.gpu_tests --"),
        (("--no-smoke",), "-m scripts.gpu_tests --no-smoke --"),
        (("-k", "fp8"), "-m scripts.gpu_tests -- -k fp8"),
    ],
)
def test_gpu_alone_runs_what_needs_one(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], passed_on: str
) -> None:
    monkeypatch.setenv("TLORA_BASE_PYTHON", str(checkout / "interpreter"))
    monkeypatch.delenv("TLORA_COMMIT", raising=False)
    process = start(checkout, "gpu", *words)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    assert (checkout / "commands").read_text().splitlines() == [passed_on]
