"""The requests of a driven job's client, and their answers, as files in the job's folder.

    jobs/ID/requests/00000001.safetensors    written once, by whoever speaks for the client
    jobs/ID/requests/covered.json            the number up to which a checkpoint counts
    jobs/ID/answers/00000001.safetensors     written by the gang that has the job's lease

Neither side holds any state: whatever dies, the other goes on from the files.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tlora_megatron.channel import RequestFolder
from tlora_megatron.files import modified_s, read_json, write_json
from tlora_megatron.service.home import Home
from tlora_megatron.training.driven_requests import (
    Answer,
    Clients,
    Request,
    RequestError,
    check_request,
)

logger = logging.getLogger(__name__)

State = Literal["unknown", "waiting", "answered", "gone"]
"""unknown: never written. gone: carried out, and its answer has been removed."""

_FORMAT = "1"
_ANSWERS_S = 86_400.0
"""Answers stay so long at least, if nobody takes them."""
_PATIENCE_S = 30.0
"""A file that the first rank has seen may take so long to be seen on another host."""
_LOOK_S = 0.01
_TYPES = {"lengths": np.int32, "tokens": np.int32, "targets": np.int64}


class RequestLog:
    """Requests and answers of one driven job, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = RequestFolder(folder / "requests", folder / "answers", suffix=".safetensors")
        self._covered = self._folder.requests / "covered.json"

    def write_request(self, number: int, request: Request) -> bool:
        """Leaves a request for the job on the disk; False if its number is taken: the first counts.

        Args:
            number: from 1. Requests are carried out in the order of their numbers, without a gap.

        Raises:
            RequestError: if it cannot be carried out, whatever the base.
        """
        if number < 1:
            raise RequestError(f"number must be at least 1, got {number}")
        check_request(request)
        if self.state(number) != "unknown":
            return False
        metadata = {"op": request.op, "params": json.dumps(dict(request.params))}
        return self._folder.ask(_name(number), _packed(request.arrays, metadata))

    def has_request(self, number: int) -> bool:
        return self._request(number).exists()

    def read_request(self, number: int) -> Request:
        """Reads a request; raises `RequestError` if it is damaged, `OSError` if not there."""
        metadata, arrays = _unpacked(self._request(number))
        try:
            op, params = metadata["op"], json.loads(metadata["params"])
        except (KeyError, ValueError) as error:
            raise RequestError(f"request {number} must be whole, got {error!r}") from error
        return Request(op=op, params=params, arrays=arrays)  # type: ignore[arg-type]

    def waiting_bytes(self) -> int:
        """Bytes of all requests that are not answered yet."""
        covered, total = self.covered(), 0
        for number in _numbers(self._folder.asked()):
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
        """Answers a request; the caller has the job's lease."""
        metadata = {
            "metrics": json.dumps({key: repr(value) for key, value in answer.metrics.items()}),
            "values": json.dumps(dict(answer.values)),
        }
        if answer.error is not None:
            metadata |= {"error": answer.error, "category": answer.category or "server"}
        arrays = {} if answer.logprobs is None else {"logprobs": answer.logprobs}
        if answer.logprobs is not None and self.has_request(number):
            arrays["lengths"] = _unpacked(self._request(number), ("lengths",))[1]["lengths"]
        self._folder.answer(_name(number), _packed(arrays, metadata))

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
        self._folder.drop_answer(_name(number))

    def covered(self) -> int:
        """Returns the number of the last request that a checkpoint counts; 0 = none."""
        value = read_json(self._covered)
        return int(value["covered"]) if value else 0

    def prune(self, covered: int) -> None:
        """Removes what a checkpoint has made superfluous, up to the last request that it counts."""
        if covered <= self.covered():
            return
        self._write_covered(covered)
        for number in _numbers(self._folder.asked()):
            if number <= covered:
                self._folder.drop_request(_name(number))
        oldest = time.time() - _ANSWERS_S
        for number in _numbers(self._folder.answered()):
            if number <= covered and modified_s(self._answer(number), oldest) < oldest:
                self.drop_answer(number)

    def forget(self) -> None:
        """Removes all requests and answers of a job that is over; what was asked is then `gone`."""
        there = [*_numbers(self._folder.asked()), *_numbers(self._folder.answered())]
        if not there:
            return
        covered = max(self.covered(), *there)
        self._write_covered(covered)
        for number in there:
            self._folder.drop_request(_name(number))
            self.drop_answer(number)

    def held_bytes(self) -> int:
        """Bytes of all requests and answers on the disk."""
        return self._folder.held_bytes()

    def _write_covered(self, covered: int) -> None:
        self._covered.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(self._covered, {"covered": covered})

    def _request(self, number: int) -> Path:
        return self._folder.request(_name(number))

    def _answer(self, number: int) -> Path:
        return self._folder.result(_name(number))


class RequestLogs(Clients):
    """The requests that wait in jobs' folders.

    A thread writes answers, in their order; `may_write` is asked by a job's name before.
    """

    def __init__(self, root: Path, may_write: Callable[[str], bool]) -> None:
        self._home = Home(root)
        self._may_write = may_write
        self._logs: dict[str, RequestLog] = {}
        self._tasks: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def has_request(self, job: str, number: int) -> bool:
        return self._of(job).has_request(number)

    def is_answered(self, job: str, number: int) -> bool:
        return self._of(job).has_answer(number)

    def read(self, job: str, number: int) -> Request:
        """Reads a request that the first rank has seen; raises `RequestError` if it is damaged."""
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._of(job).read_request(number)
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_LOOK_S)

    def answer(self, job: str, number: int, answer: Answer) -> None:
        """Has a request answered, unless it was before. Does not wait."""

        def write() -> None:
            if not self._of(job).has_answer(number):
                self._of(job).write_answer(number, answer)

        self._submit(job, write)

    def covered(self, job: str, number: int) -> None:
        """Has requests removed that a checkpoint counts. Does not wait."""
        self._submit(job, lambda: self._of(job).prune(number))

    def flush(self, job: str | None) -> None:
        """Waits until everything so far is on the disk."""
        self._tasks.join()

    def state_folder(self, path: str) -> Path:
        """The folder of a state of any job of this service."""
        return self._home.root / path

    def _of(self, job: str) -> RequestLog:
        if job not in self._logs:
            self._logs[job] = RequestLog(self._home.job(job))
        return self._logs[job]

    def _submit(self, job: str, run: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tlora-answers", daemon=True)
            self._thread.start()
        self._tasks.put((job, run))

    def _work(self) -> None:
        while True:
            job, run = self._tasks.get()
            try:
                self._carry_out(job, run)
            except Exception:
                logger.exception("an answer to the client of job %s is lost", job)
            self._tasks.task_done()

    def _carry_out(self, job: str, run: Callable[[], None]) -> None:
        """Tries for a while what the disk refuses; a job of somebody else is left alone."""
        end_s = time.monotonic() + _PATIENCE_S
        while self._may_write(job):
            try:
                run()
                return
            except OSError as error:
                if time.monotonic() > end_s:
                    raise
                logger.warning("job %s: an answer must wait: %s", job, error)
                time.sleep(1.0)


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


def _name(number: int) -> str:
    return f"{number:08d}"


def _numbers(names: list[str]) -> list[int]:
    return [int(name) for name in names if name.isdecimal()]
