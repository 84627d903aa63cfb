"""The requests of a driven job's client, and their answers, as files in the job's folder.

    jobs/ID/requests/00000001.safetensors    written once, by whoever speaks for the client
    jobs/ID/requests/covered.json            the number up to which a checkpoint counts
    jobs/ID/answers/00000001.safetensors     written by the gang that has the job's lease

Neither side holds any state: whatever dies, the other goes on from the files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tlora_megatron.files import flush, read_json, write_atomic, write_json
from tlora_megatron.service.home import make_folder
from tlora_megatron.training.driven.requests import Answer, Request, RequestError, check_request

State = Literal["unknown", "waiting", "answered", "gone"]
"""unknown: never written. gone: carried out, and its answer has been removed."""

_FORMAT = "1"
_FILE = re.compile(r"(\d{8,})\.safetensors")
_COVERED = "covered.json"
_ANSWERS_S = 86_400.0
"""Answers stay so long at least, if nobody takes them."""
_TYPES = {"lengths": np.int32, "tokens": np.int32, "targets": np.int64}


class Journal:
    """Requests and answers of one driven job.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._requests = folder / "requests"
        self._answers = folder / "answers"

    def write_request(self, number: int, request: Request) -> bool:
        """Leaves a request for the job; it is on the disk when this returns.

        Args:
            number: from 1. Requests are carried out in the order of their numbers, without a gap.

        Returns:
            False if there was one of this number before: the first counts.

        Raises:
            RequestError: if it cannot be carried out, whatever the base.
            OSError: if the disk refuses.
        """
        if number < 1:
            raise RequestError(f"number must be at least 1, got {number}")
        check_request(request)
        if self.state(number) != "unknown":
            return False
        make_folder(self._requests)
        metadata = {"op": request.op, "params": json.dumps(dict(request.params))}
        return _write_once(self._request(number), _packed(request.arrays, metadata))

    def has_request(self, number: int) -> bool:
        """True if a request of this number waits or was carried out since the last checkpoint."""
        return self._request(number).exists()

    def read_request(self, number: int) -> Request:
        """Reads a request.

        Raises:
            RequestError: if the file is damaged.
            OSError: if there is none, or the disk refuses.
        """
        metadata, arrays = _unpacked(self._request(number))
        try:
            op, params = metadata["op"], json.loads(metadata["params"])
        except (KeyError, ValueError) as error:
            raise RequestError(f"request {number} must be whole, got {error!r}") from error
        return Request(op=op, params=params, arrays=arrays)  # type: ignore[arg-type]

    def waiting_bytes(self) -> int:
        """Bytes of all requests that are not answered yet."""
        covered, total = self.covered(), 0
        for number in _numbers(self._requests):
            if number > covered and not self.has_answer(number):
                with suppress(FileNotFoundError):
                    total += self._request(number).stat().st_size
        return total

    def state(self, number: int) -> State:
        """How far a request is."""
        if self._answer(number).exists():
            return "answered"
        if self._request(number).exists():
            return "waiting"
        if number > self.covered():
            return "unknown"
        return "answered" if self._answer(number).exists() else "gone"

    def write_answer(self, number: int, answer: Answer) -> None:
        """Answers a request; the caller has the job's lease.

        Raises:
            OSError: if the disk refuses.
        """
        make_folder(self._answers)
        metadata = {
            "metrics": json.dumps({key: repr(value) for key, value in answer.metrics.items()}),
            "values": json.dumps(dict(answer.values)),
        }
        if answer.error is not None:
            metadata |= {"error": answer.error, "category": answer.category or "server"}
        arrays = {} if answer.logprobs is None else {"logprobs": answer.logprobs}
        if answer.logprobs is not None and self.has_request(number):
            arrays["lengths"] = _unpacked(self._request(number), ("lengths",))[1]["lengths"]
        write_atomic(self._answer(number), _packed(arrays, metadata))

    def has_answer(self, number: int) -> bool:
        """True if a request was answered and nobody has taken the answer."""
        return self._answer(number).exists()

    def read_answer(self, number: int) -> Answer | None:
        """Returns the answer to a request; None = there is none, not yet or not any more."""
        try:
            metadata, arrays = _unpacked(self._answer(number))
        except FileNotFoundError:
            return None
        metrics = json.loads(metadata["metrics"])
        return Answer(
            metrics={key: float(value) for key, value in metrics.items()},
            values=json.loads(metadata["values"]),
            logprobs=arrays.get("logprobs"),
            lengths=arrays.get("lengths"),
            error=metadata.get("error"),
            category=metadata.get("category"),  # type: ignore[arg-type]
        )

    def drop_answer(self, number: int) -> None:
        """Removes an answer that was taken and will not be asked for again."""
        self._answer(number).unlink(missing_ok=True)

    def covered(self) -> int:
        """Returns the number of the last request that a checkpoint counts; 0 = none."""
        value = read_json(self._requests / _COVERED)
        return int(value["covered"]) if value else 0

    def prune(self, covered: int) -> None:
        """Removes what a checkpoint has made superfluous; the caller has the job's lease.

        Args:
            covered: the last request that the checkpoint counts.
        """
        if covered <= self.covered():
            return
        write_json(make_folder(self._requests) / _COVERED, {"covered": covered})
        for number in _numbers(self._requests):
            if number <= covered:
                self._request(number).unlink(missing_ok=True)
        oldest = time.time() - _ANSWERS_S
        for number in _numbers(self._answers):
            if number <= covered and _written_at(self._answer(number)) < oldest:
                self.drop_answer(number)

    def forget(self) -> None:
        """Removes all requests and answers of a job that is over; what was asked is then `gone`."""
        there = [*_numbers(self._requests), *_numbers(self._answers)]
        if not there:
            return
        covered = max(self.covered(), *there)
        write_json(make_folder(self._requests) / _COVERED, {"covered": covered})
        for number in there:
            self._request(number).unlink(missing_ok=True)
            self.drop_answer(number)

    def held_bytes(self) -> int:
        """Bytes of all requests and answers on the disk."""
        total = 0
        for folder in (self._requests, self._answers):
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):  # one that is removed meanwhile
                        total += entry.stat().st_size
        return total

    def _request(self, number: int) -> Path:
        return self._requests / f"{number:08d}.safetensors"

    def _answer(self, number: int) -> Path:
        return self._answers / f"{number:08d}.safetensors"


def _packed(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    typed = {
        name: np.ascontiguousarray(array, dtype=_TYPES.get(name, np.float32))
        for name, array in arrays.items()
    }
    return save(typed, {"format": _FORMAT, **metadata})


def _unpacked(
    path: Path, names: Collection[str] | None = None
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    try:
        with safe_open(path, "np") as file:
            wanted = file.keys() if names is None else names
            arrays = {name: file.get_tensor(name) for name in wanted}
            return dict(file.metadata() or {}), arrays
    except SafetensorError as error:
        raise RequestError(f"{path.name} must be a whole file, got {error}") from error


def _write_once(path: Path, content: bytes) -> bool:
    """Writes a file unless there is one of that name; returns if it did."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    write_atomic(aside, content)
    try:
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    flush(path.parent)
    return True


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(found[1]) for found in map(_FILE.fullmatch, names) if found]


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
