"""The interface of a service for commands, the same for a folder of this host and an address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tlora_megatron.cli.tables import open_console
from tlora_megatron.config.reader import ConfigError, must


def missing_job(name: str) -> ConfigError:
    return must("NAME", "be the id or the name of a job", name, "`tlora jobs --all` lists them")


def warn(sentences: Iterable[str]) -> None:
    """Prints sentences about settings that have no effect."""
    console = open_console(stderr=True)
    for sentence in sentences:
        console.print(f"warning: {sentence}", style="yellow")


RequestedAction = Literal["cancel", "pause", "resume"]
Row = dict[str, Any]
ADAPTER = "adapter"


class JobRow(Protocol):
    """A job as commands show it; times are Unix seconds."""

    # fmt: off
    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> Any: ...
    @property
    def wish(self) -> str | None: ...
    @property
    def step(self) -> int: ...
    @property
    def num_steps(self) -> int | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def gang(self) -> str | None: ...
    @property
    def submitted_at(self) -> float: ...
    @property
    def ended_at(self) -> float | None: ...
    # fmt: on


class Accepted(NamedTuple):
    """The outcome of a submit."""

    jobs: Sequence[JobRow]
    new: frozenset[str]
    """Ids of those that it made; the others' key came before."""


class Service(Protocol):
    """A service that a command has opened."""

    look_every_s: float
    """How often to ask it for what is new."""

    @property
    def place(self) -> str:
        """Folder or address."""

    @property
    def is_served(self) -> bool:
        """True while a controller gives signs of life."""

    @property
    def how_to_serve(self) -> str:
        """The command that starts a controller of it."""

    def submit(self, files: Sequence[str], overrides: Sequence[str], key: str) -> Accepted:
        """Submits all jobs of all files, or none; warns of settings without effect."""

    def find(self, name: str) -> JobRow:
        """The job of an id or a name; raises `ConfigError` if there is none."""

    def get(self, jobs: Sequence[str]) -> list[JobRow]:
        """The jobs of these ids, as they are now."""

    def all(self, states: Sequence[str] | None) -> Iterator[JobRow]:
        """All jobs in these states (None: in any), the first submitted first."""

    def counts(self) -> Mapping[Any, int]:
        """Number of jobs in each state that has any."""

    def news(self) -> object:
        """Equal to what it was before if no job has changed its state since."""

    def request_action(self, jobs: Sequence[JobRow], action: RequestedAction) -> list[JobRow]:
        """Asks to end or hold jobs, or to let them go on."""

    def history(self, job: JobRow, *, follow: bool) -> Iterator[Row]:
        """The events of a job and its steps, with `follow` also those until its end."""

    def fetch_adapter(self, job: JobRow, out: Path) -> None:
        """Writes the adapter of a finished job into a new folder, whole or not at all."""


def find_jobs(service: Service, names: Sequence[str]) -> list[JobRow]:
    """The jobs that a command names, by id or name, each once, in order; refuses unknown ones."""
    found = {job.id: job for job in map(service.find, names)}
    return list(found.values())
