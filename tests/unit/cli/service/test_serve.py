"""`tlora serve`: a mistake in its options is refused before a folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import Tlora
from tlora_megatron.service.front import Place, listen


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--http", "99999"], "--http must be PORT or HOST:PORT, with a port of at most 65535"),
        (["--http", "port"], "--http must be PORT or HOST:PORT, with a port of at most 65535"),
        (["--base", "llama"], "--base must be NAME=DIR or NAME=FILE.yaml"),
        (["--hardware", "abacus"], "abacus"),
        (["--http", "0", "--keep-sessions", "0.5"], "--keep-sessions must be at least 1 day, got"),
        (["--http", "0", "--keep-sessions", "nan"], "--keep-sessions must be at least 1 day, got"),
        (["--sampler", "vllm"], "--sampler must be left out without --http, got 'vllm'"),
        (["--sampler-gpu", "1"], "--sampler-gpu must be left out without --http, got '1'"),
        (["--keep-sessions", "3"], "--keep-sessions must be left out without --http, got 3"),
        (["--http", "0", "--sampler-address", "u"], "--sampler-address must be given with"),
        (
            ["--http", "0", "--sampler", "off", "--sampler-gpu", "1"],
            "--sampler-gpu must be left out with --sampler off, got '1'",
        ),
        (
            ["--http", "0", "--sampler", "vllm", "--sampler-address", "u", "--sampler-gpu", "1"],
            "--sampler-gpu must be left out with --sampler-address, whose server",
        ),
    ],
)
def test_wrong_options_leave_nothing_behind(
    words: list[str], sentence: str, tmp_path: Path, tlora: Tlora
) -> None:
    folder = tmp_path / "service"
    assert sentence in tlora("serve", "--service", folder, *words, code=2)
    assert not folder.exists()


def test_a_port_in_use_leaves_nothing_behind(tmp_path: Path, tlora: Tlora) -> None:
    folder = tmp_path / "service"
    with listen(Place("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = tlora("serve", "--service", folder, "--http", port, code=2)
    assert "--http must be a free port of this host" in said
    assert not tlora.out
    assert not folder.exists()
