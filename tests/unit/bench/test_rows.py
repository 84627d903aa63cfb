"""Where benches put their rows, and the commit that they name."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.harness import rows


def test_a_new_file_gets_the_columns_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    rows.append_rows(path, [{"gpu": "H200", "us": 1.5}, {"us": 2, "gpu": "a, b"}])
    rows.append_rows(path, [{"us": "", "gpu": "é"}])
    text = path.read_bytes().decode()
    assert text == 'gpu,us\nH200,1.5\n"a, b",2\né,\n'


@pytest.mark.parametrize("row", [{"gpu": 1}, {"gpu": 1, "ms": 2}, {"gpu": 1, "us": 2, "ms": 3}])
def test_rows_of_other_columns_are_refused_and_the_file_stays(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    path = tmp_path / "rows.csv"
    rows.append_rows(path, [{"gpu": 1, "us": 2}])
    with pytest.raises(ValueError, match=r"columns of .*rows.csv must be .*, got gpu, us; name"):
        rows.append_rows(path, [{"gpu": 3, "us": 4}, row])
    assert path.read_text() == "gpu,us\n1,2\n"


def test_the_commit_is_the_checkout_s_wherever_a_bench_is_started(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(repo), "rev-parse", "--short", "HEAD"]
    here = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    monkeypatch.chdir(tmp_path)
    assert rows.checkout_commit() == (here or "unknown")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rows.checkout_commit() == "unknown"
