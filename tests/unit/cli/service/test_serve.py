"""`tlora serve`: a mistake in its options is refused before a folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_megatron.cli.main import main


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--http", "99999"], "--http must be PORT or HOST:PORT, with a port of at most 65535"),
        (["--http", "door"], "--http must be PORT or HOST:PORT, with a port of at most 65535"),
        (["--base", "llama"], "--base must be NAME=DIR or NAME=FILE.yaml"),
        (["--hardware", "abacus"], "abacus"),
    ],
)
def test_wrong_options_leave_nothing_behind(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "service"
    assert main(["serve", "--service", str(folder), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not folder.exists()
