"""The output folder of a run: new, or holding the same run, used by no other; and changes to it.

`OUT/.live` is there while a run of `tlora train` takes requests, a folder that only its user can
open. Each request is a file, put there by a rename; so is each answer. Nothing listens on a port,
and the processes of both may be on different hosts.

`OUT/live_changes.json` holds the jobs that were added and the names of those that were cancelled.
The run's own file does not know of them. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tlora_megatron.channel import RequestFolder
from tlora_megatron.config.job import JobSpec
from tlora_megatron.config.load import config_to_dict, fit_job
from tlora_megatron.config.reader import ConfigError, show
from tlora_megatron.config.schema import BaseModelSpec, RunConfig
from tlora_megatron.config.sections import job_to_dict, read_job
from tlora_megatron.files import BY_UMASK, write_atomic

CONFIG_NAME = "config.json"
"""The resolved configuration: a directory with one holds a run."""
_LOCK_NAME = ".lock"
_CHANGEABLE = {"path", "quantization", "unquantised"}
"""Keys of `base_model` that a run may change where it says so; each job's checkpoint is checked."""


@contextmanager
def hold_output_dir(output_dir: Path) -> Iterator[None]:
    """Keeps other runs out of the directory while this one writes; only the writer calls it.

    The kernel releases the lock when the process ends, however it ends. On a file system without
    locks nothing is kept out.
    """
    with (output_dir / _LOCK_NAME).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"run.output_dir must not be in use, got {output_dir}, where another run writes"
            ) from error
        except OSError:  # no locks there
            pass
        yield


def is_held(output_dir: Path) -> bool:
    """True if a run writes there; also where the file system has no locks, so nobody can tell."""
    try:
        with (output_dir / _LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, PermissionError):
        return False
    except OSError:  # held, or no locks there
        return True
    return False


def claim_output_dir(output_dir: Path, config: RunConfig) -> bool:
    """Looks whether a run may write there; returns True if it holds this run, to be resumed.

    The directory is made by `make_output_dir`, once nothing is wrong with the input: a run that is
    refused leaves nothing behind.

    Raises:
        ValueError: if it holds another run, is not writable, or `run.resume` asks otherwise.
    """
    held = output_dir / CONFIG_NAME
    resume = config.run.resume
    if held.is_file():
        if resume == "never":
            raise ValueError(
                f"run.output_dir must not hold a run with run.resume: never, got {output_dir}"
            )
        if other := _other_base(held, config_to_dict(config)["base_model"]):
            raise ValueError(
                f"run.output_dir must be new or hold this run, got {output_dir} with {other}"
            )
    elif resume == "always":
        raise ValueError(
            f"run.output_dir must hold a run with run.resume: always, got {output_dir}"
        )
    elif left := sorted(output_dir.glob("jobs/*/checkpoints/step_*")):
        raise ValueError(
            f"run.output_dir must be new or hold this run, got {output_dir} with {left[0]} but "
            f"without its {CONFIG_NAME}; put that back, or move the checkpoints away"
        )
    there = next(path for path in (output_dir, *output_dir.parents) if os.path.lexists(path))
    try:
        # Not a name made from the process id: processes of other nodes may have the same.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(output_dir, error) from error
    return held.is_file()


def make_output_dir(output_dir: Path) -> None:
    """Makes the directory of a run that begins, where it is missing."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(output_dir, error) from error


def _unwritable(output_dir: Path, error: OSError) -> ValueError:
    return ValueError(f"run.output_dir must be writable, got {output_dir}: {error}")


def _other_base(held: Path, ours: dict[str, Any]) -> str:
    """Says what a config.json that is there holds instead of our `base_model`; empty for ours."""
    try:
        # A key that came with a later version had its default's effect before.
        defaults = json.loads(json.dumps(asdict(BaseModelSpec())))
        theirs = defaults | dict(json.loads(held.read_text())["base_model"])
    except (ValueError, TypeError, KeyError):  # such as a model's
        return f"a {CONFIG_NAME} that is no run's"
    keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    keys = [key for key in keys if key != "allow_change"]
    may_change = _CHANGEABLE.issuperset(keys)
    if not keys or (ours["allow_change"] and may_change):
        return ""
    differences = (
        f"{key} {show(theirs.get(key))} instead of {show(ours.get(key))}" for key in keys
    )
    remedy = "; base_model.allow_change: true lets its jobs go on over it"
    return f"a run over another base_model: {', '.join(differences)}" + (
        remedy if may_change and keys != ["path"] else ""
    )


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
    """The side of the run, on the process that writes its files; makes the folder of requests."""

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
        document = {"added": list(self.added.values()), "cancelled": self.cancelled}
        write_atomic(output_dir / FILE_NAME, json.dumps(document, indent=2), mode=BY_UMASK)

    def add(self, job: JobSpec) -> None:
        self.added[job.name] = job_to_dict(job)
        if job.name in self.cancelled:
            self.cancelled.remove(job.name)

    def cancel(self, name: str) -> None:
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
