"""The command line in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tlora_megatron.cli.main import main


class Tlora:
    """Runs `tlora` with words, which may be paths; the fixture `tlora` is one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""
        """What the last command wrote."""

    def __call__(self, *words: object, code: int = 0) -> str:
        """Returns what a command wrote: to stderr if its exit code is to be 2, else to stdout."""
        self._capsys.readouterr()
        found: object
        try:
            found = main(list(map(str, words)))
        except SystemExit as ended:  # argparse's, for --help and for words that it does not take
            found = ended.code
        self.out, self.err = self._capsys.readouterr()
        assert found == code, self.err
        return self.err if code == 2 else self.out

    def json(self, *words: object, code: int = 0) -> Any:
        """Returns what a command prints with `--json`."""
        self(*words, "--json", code=code)
        return json.loads(self.out)
