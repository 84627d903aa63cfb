"""Changes to a run of `tlora train` that trains: requests for them, and what its next start knows.

`OUT/.live` is there while a run takes requests, a folder that only its user can open. Each request
is a file, put there by a rename; so is each answer. Nothing listens on a port, and the processes of
both may be on different hosts.

`OUT/live_changes.json` holds the jobs that were added and the names of those that were cancelled.
The run's own file does not know of them. Imports no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.channel import RequestFolder
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import fit_job
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.config.schema import RunConfig
from tlora_megatron.config.sections import job_to_dict, read_job
from tlora_megatron.files import BY_UMASK, write_atomic
from tlora_megatron.training.run.output_dir import CONFIG_NAME, is_held

FOLDER = ".live"
FILE_NAME = "live_changes.json"
TOKENS = f"{FOLDER}/tokens"
"""Below the output folder: a cache of the tokens of jobs that are added."""
_LOOK_S = 0.05
ALIVE_S = 1.0
_LARGEST_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Request(NamedTuple):
    """A request to a run that trains."""

    number: str
    body: Mapping[str, Any]


def _requests_in(folder: Path) -> RequestFolder:
    return RequestFolder(folder / "requests", folder / "answers", mode=BY_UMASK)


class LiveFolder:
    """The run's side of its requests, on the process that writes its files; makes their folder."""

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / FOLDER
        self._requests = _requests_in(self.folder)
        self._open: set[str] = set()
        """Requests without an answer."""
        self._answered_s = 0.0
        _remove(self.folder)
        for folder in (self.folder, self._requests.requests, self._requests.answers):
            folder.mkdir(mode=0o700)

    @property
    def has_requests(self) -> bool:
        """True if a request waits; looks at the folder alone."""
        try:
            return bool(self._requests.asked())
        except OSError:  # taken away under the run, which trains on
            return False

    def take(self) -> list[Request]:
        """The requests that have come, each once; what is none is answered as an error."""
        found = []
        for name in self._requests.asked():
            self._open.add(name)
            try:
                found.append(Request(name, _read(self._requests.request(name))))
            except (OSError, ValueError) as error:
                self.answer(name, {"error": f"a request must be a JSON object: {error}"})
            self._requests.drop_request(name)
        return found

    def answer(self, number: str, body: Mapping[str, Any]) -> None:
        """Answers a request, once."""
        if number in self._open:
            self._open.remove(number)
            self._answered_s = time.monotonic()
            with suppress(OSError):
                self._requests.answer(number, json.dumps(body).encode())

    def close(self) -> None:
        """Removes the folder, once the last answers are taken; a second call does nothing."""
        self._open.clear()
        while time.monotonic() < self._answered_s + 2 * ALIVE_S and self._requests.answered():
            time.sleep(_LOOK_S)
        with suppress(OSError):
            _remove(self.folder)


class LiveRun:
    """The side of a process that asks something of a run.

    Raises:
        ValueError: if no run trains there, or it is somebody else's.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._folder = output_dir / FOLDER
        if not self._folder.is_dir() or not is_held(output_dir):
            raise ValueError(
                f"a run must be training in {output_dir}, got none; without --add and --cancel "
                f"`tlora train` starts one"
            )
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise ValueError(f"the run in {output_dir} must be your own, got somebody else's")

    def ask(
        self, body: Mapping[str, Any], wait: Callable[[float], None] = time.sleep
    ) -> Mapping[str, Any]:
        """Hands a request over and waits for its answer.

        Raises:
            RuntimeError: if the run ends before.
        """
        number = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        ended = RuntimeError(f"the run in {self.output_dir} has ended before it answered")
        requests = _requests_in(self._folder)
        try:
            requests.ask(number, json.dumps(body).encode())
        except OSError as error:
            raise ended from error
        looked_s = time.monotonic()
        while True:
            with suppress(FileNotFoundError):
                answer = _read(requests.result(number))
                requests.drop_answer(number)
                return answer
            if time.monotonic() - looked_s > ALIVE_S:
                looked_s = time.monotonic()
                if not self._folder.is_dir() or not is_held(self.output_dir):
                    raise ended
            wait(_LOOK_S)


def _read(path: Path) -> Mapping[str, Any]:
    with os.fdopen(os.open(path, _READ), "rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise ValueError(f"larger than {_LARGEST_BYTES} bytes")
        body = json.loads(file.read())
    if not isinstance(body, dict):
        raise ValueError(f"got {type(body).__name__}")
    return body


def _remove(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


@dataclass(slots=True)
class LiveChanges:
    """Jobs that were added to a run and cancelled in it."""

    added: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Documents by name, in the order in which they joined."""
    cancelled: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, output_dir: Path) -> LiveChanges:
        """The changes of the run in a folder; none if nothing was changed."""
        path = output_dir / FILE_NAME
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            added: dict[str, Mapping[str, Any]] = {str(j["name"]): dict(j) for j in value["added"]}
            return cls(added, [str(name) for name in value["cancelled"]])
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} must hold what was changed while the run trained, got {error!r}; move it "
                f"away to train the jobs of the run's own file alone"
            ) from error

    def write(self, output_dir: Path) -> None:
        """Keeps the changes."""
        document = {"added": list(self.added.values()), "cancelled": self.cancelled}
        write_atomic(output_dir / FILE_NAME, json.dumps(document, indent=2), mode=BY_UMASK)

    def add(self, job: JobSpec) -> None:
        """Notes that a job has joined."""
        self.added[job.name] = job_to_dict(job)
        if job.name in self.cancelled:
            self.cancelled.remove(job.name)

    def cancel(self, name: str) -> None:
        """Notes that a job was cancelled."""
        if name not in self.cancelled:
            self.cancelled.append(name)


def with_live_changes(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Applies what was changed while an earlier part of the run trained.

    Returns:
        The configuration with the jobs that were added and without those that were cancelled, and a
        sentence for each.

    Raises:
        ConfigError: if nothing is left to train, or a job that was added does not fit any more.
    """
    output_dir = Path(config.run.output_dir)
    if config.run.resume == "never" or not (output_dir / CONFIG_NAME).is_file():
        return config, ()
    changes = LiveChanges.read(output_dir)
    notes = []
    own = {job.name for job in config.jobs} | {error.name for error in config.job_errors}
    jobs = list(config.jobs)
    for name, document in changes.added.items():
        if name not in own and name not in changes.cancelled:
            job = read_job(dict(document), Path.cwd(), path=f"job {name} of {FILE_NAME}")
            jobs.append(fit_job(job, config))
            notes.append(f"job {name} was added while the run trained and goes on")
    for job in [job for job in jobs if job.name in changes.cancelled]:
        jobs.remove(job)
        notes.append(
            f"job {job.name} was cancelled while the run trained and stays out; delete its name "
            f"from {output_dir / FILE_NAME} to train it on"
        )
    if not jobs:
        raise ConfigError(f"jobs must hold at least one that can start, got {'; '.join(notes)}")
    return replace(config, jobs=tuple(jobs)), tuple(notes)
