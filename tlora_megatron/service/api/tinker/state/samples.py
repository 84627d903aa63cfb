"""Requests to samplers and their answers as files; the work itself is done in this process.

SESSION/samples/N/SEQ.json    what was asked, with its seed: asked again, it gives the same
SESSION/samples/N/SEQ.pb      the answer in protobuf
SESSION/samples/N/SEQ.error   why there is none, in JSON

None is flushed to the disk, since a sample that is lost is drawn again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tlora_megatron.files import write_atomic
from tlora_megatron.service.home import make_folder


class SampleFiles:
    """The files of one request of a sampler.

    Args:
        folder: of the sampler.
        seq_id: of the request.
    """

    def __init__(self, folder: Path, seq_id: int) -> None:
        self.asked_file = folder / f"{seq_id}.json"
        self._answer_file = folder / f"{seq_id}.pb"
        self._error_file = folder / f"{seq_id}.error"

    def ask(self, body: Mapping[str, Any]) -> bool:
        """Writes what is asked; False if it was asked before."""
        if self.asked_file.exists():
            return False
        make_folder(self.asked_file.parent)
        write_atomic(self.asked_file, json.dumps(dict(body)), durable=False)
        return True

    def asked(self) -> Mapping[str, Any] | None:
        """The request; None if there was none."""
        try:
            found: Mapping[str, Any] = json.loads(self.asked_file.read_bytes())
        except FileNotFoundError:
            return None
        return found

    def answer(self, content: bytes) -> None:
        """Writes the answer."""
        write_atomic(self._answer_file, content, durable=False)

    def fail(self, error: str, category: str) -> None:
        """Writes why there is no answer."""
        text = json.dumps({"error": error, "category": category})
        write_atomic(self._error_file, text, durable=False)

    def result(self) -> bytes | Mapping[str, Any] | None:
        """The answer, or why there is none; None = not yet."""
        try:
            return self._answer_file.read_bytes()
        except FileNotFoundError:
            pass
        try:
            found: Mapping[str, Any] = json.loads(self._error_file.read_bytes())
        except FileNotFoundError:
            return None
        return found


def sweep_samples(folder: Path, before: float) -> None:
    """Deletes what the samplers of a folder were asked before a time, in Unix seconds."""
    for file in folder.glob("*/*"):
        with suppress(FileNotFoundError):  # one that is being written gets another name
            if file.stat().st_mtime < before:
                file.unlink()
