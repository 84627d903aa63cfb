"""Runs the tests that need one GPU and keeps what came of it, for `scripts/test.sh gpu`.

    python -m scripts.gpu_tests            # runs them and writes tests/gpu/last_run.json
    python -m scripts.gpu_tests --no-smoke # without measuring the smoke figures
    python -m scripts.gpu_tests --status   # one line about that record; 1 if it says "failed"

CI has no GPU, so the record in the tree is what says that the paths on GPUs work. It names the
commit and digests of the folders that only a GPU shows; `--status` says what has changed since.

A test that is skipped because a package or a checkout is missing counts as failed: what the README
and the docs sell is run. Skipped without harm are those that need several GPUs, and combinations
that a kernel does not take, whose reason is printed with their number.

Behind the tests `scripts.bench.smoke` measures the figures that the README is known for. One that
is more than 5 % short is printed and kept in the record; one that cannot be measured is a failure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.bench.harness.rows import checkout_commit

REPO = Path(__file__).resolve().parent.parent
RECORD = REPO / "tests" / "gpu" / "last_run.json"
PACKAGE = "tlora_megatron"
TREES = (
    *(f"{PACKAGE}/{name}" for name in ("ops", "layers", "parallel", "integrations")),
    *(f"{PACKAGE}/{name}" for name in ("training", "model")),
    "csrc",
)
"""What the tests on GPUs cover."""
_MISSING = re.compile(r"^needs (?!\d|two |four )|could not import|must name a Megatron-LM", re.I)
"""Reasons of skipped tests that say "this machine lacks a package or a checkout"."""
_VERSIONS = (
    *("torch", "triton", "transformers", "peft", "megatron-core"),
    *("transformer-engine", "deepspeed", "flash-attn-4"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What pytest reports of one run."""

    passed: int
    failures: tuple[str, ...]
    """Tests that failed, with the first line of the reason."""
    skipped: dict[str, int]
    """Reason -> number of tests."""

    @property
    def missing(self) -> dict[str, int]:
        """Skipped for something that this machine should have."""
        return {why: count for why, count in self.skipped.items() if _MISSING.search(why)}

    @property
    def is_green(self) -> bool:
        """True if nothing failed, something passed and nothing that is sold was left out."""
        return self.passed > 0 and not self.failures and not self.missing


def read_report(path: Path) -> Outcome:
    """Reads a junit XML file of pytest's."""
    passed, failures, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(path).iter("testcase"):
        wrong = next((part for part in case if part.tag in ("failure", "error")), None)
        left_out = case.find("skipped")
        if wrong is not None:
            message = (wrong.get("message") or wrong.text or "").strip().splitlines()
            name = f"{case.get('classname', '')}::{case.get('name')}"
            failures.append(f"{name}: {message[0] if message else ''}"[:300])
        elif left_out is not None:
            skipped[(left_out.get("message") or "").removeprefix("Skipped: ")[:160]] += 1
        else:
            passed += 1
    return Outcome(passed=passed, failures=tuple(failures), skipped=dict(skipped.most_common()))


def digests(repo: Path = REPO) -> dict[str, str]:
    """A digest of each covered folder: names and bytes of its sources."""
    found = {}
    for tree in TREES:
        digest = hashlib.sha256()
        for path in sorted((repo / tree).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(repo)).encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        found[tree] = digest.hexdigest()[:16]
    return found


def status(record: Path = RECORD, repo: Path = REPO) -> tuple[str, bool]:
    """One line about the record, and whether the record itself is not "failed"."""
    if not record.is_file():
        return "GPU tests have no record: run ./scripts/test.sh gpu on a machine with a GPU", True
    kept = json.loads(record.read_text(encoding="utf-8"))
    commit = str(kept["commit"])
    if not kept["passed"]:
        return f"GPU tests FAILED at {commit[:9]}: run ./scripts/test.sh gpu again", False
    now = digests(repo)
    trees = [tree for tree in TREES if kept["trees"].get(tree) != now[tree]]
    if trees:
        count = _num_changed(repo, commit, trees)
        what = "files" if count is None else f"{count} files"
        since = f"since then {what} that they cover have changed, in {', '.join(trees)}"
    else:
        since = "nothing that they cover has changed"
    short = sum(figure["short"] for figure in kept.get("smoke", {}).get("figures", ()))
    smoke = f"; {short} smoke figure{'s' * (short > 1)} short" if short else ""
    return f"GPU tests last passed at {commit[:9]}; {since}{smoke}", True


def _num_changed(repo: Path, commit: str, trees: Sequence[str]) -> int | None:
    """Files that differ from a commit; None where git cannot say."""
    command = ["git", "-C", str(repo), "diff", "--name-only", commit, "--", *trees]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return len(found.stdout.split()) if found.returncode == 0 else None


def run(workers: int, words: Sequence[str]) -> tuple[Outcome, float]:
    """Runs pytest over tests/gpu; returns what came of it and the seconds."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = (
            *(sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile"),
            *("--durations=12", "--no-header", "-r", "fE", f"--junitxml={report}"),
            *("tests/gpu", *words),
        )
        subprocess.run(command, cwd=REPO, check=False)
        if report.is_file():
            outcome = read_report(report)
        else:
            outcome = Outcome(passed=0, failures=("pytest wrote no report",), skipped={})
    return outcome, time.monotonic() - begin_s


def measure_smoke(commit: str) -> dict[str, Any]:
    """Measures the smoke figures, which prints them; returns what goes into the record."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "smoke.json"
        command = (sys.executable, "-m", "scripts.bench.smoke", "--commit", commit)
        code = subprocess.run((*command, "--json", str(file)), cwd=REPO, check=False).returncode
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    return {"commit": commit, "figures": [], "failures": [f"exit status {code}, no figures"]}


def write_record(
    outcome: Outcome,
    seconds: float,
    commit: str,
    smoke: dict[str, Any] | None = None,
    path: Path = RECORD,
) -> bool:
    """Writes the record; returns whether it says "passed".

    Args:
        smoke: what `measure_smoke` returned; None = what the record has of it stays.
    """
    import torch

    if smoke is None and path.is_file():
        smoke = json.loads(path.read_text(encoding="utf-8")).get("smoke")
    on_gpu = torch.cuda.is_available()
    passed = outcome.is_green and not (smoke or {}).get("failures")
    record = {
        "passed": passed,
        "commit": commit,
        "trees": digests(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {"python": sys.version.split()[0]} | _versions(),
        "tests": asdict(outcome) | {"missing": sum(outcome.missing.values())},
        "seconds": round(seconds),
    } | ({} if smoke is None else {"smoke": smoke})
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return passed


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def show(outcome: Outcome, seconds: float) -> str:
    """What the command prints behind pytest's own lines."""
    lines = [f"{count:5d} skipped: {why}" for why, count in outcome.skipped.items()]
    lines += [f"FAILED {failure}" for failure in outcome.failures]
    lines += [
        f"NOT RUN: {count} tests of what the docs sell: {why}"
        for why, count in outcome.missing.items()
    ]
    total = f"{outcome.passed} passed, {len(outcome.failures)} failed"
    lines.append(f"{total}, {sum(outcome.skipped.values())} skipped in {seconds:.0f} s")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if anything failed, or what is sold was not run or not measured."""
    first_line = str(__doc__).partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_tests", description=first_line)
    parser.add_argument("--status", action="store_true", help="say what the record says")
    parser.add_argument("--commit", help="what is tested, where git cannot say")
    parser.add_argument("--workers", type=int, default=min(8, max(1, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--no-smoke", action="store_true", help="leave out the smoke figures")
    parser.add_argument(
        "words", nargs="*", help="words for pytest; nothing is measured or recorded then"
    )
    options = parser.parse_args(argv)
    if options.status:
        line, is_good = status()
        print(line)
        return 0 if is_good else 1
    outcome, seconds = run(options.workers, options.words)
    print(show(outcome, seconds))
    if options.words:
        return 0 if outcome.is_green else 1
    commit = options.commit or checkout_commit()
    smoke = None if options.no_smoke else measure_smoke(commit)
    return 0 if write_record(outcome, seconds, commit, smoke) else 1


if __name__ == "__main__":
    sys.exit(main())
