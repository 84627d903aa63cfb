"""How a loop hears of clients' requests and answers them: implemented by whoever keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tlora_megatron.training.driven.requests import Answer, Request


class Clients(Protocol):
    """The requests of all driven jobs, by the jobs' names and by number from 1."""

    def has_request(self, job: str, number: int) -> bool:
        """True if the request is there; asked on the first rank, many times a second."""

    def is_answered(self, job: str, number: int) -> bool:
        """True if it was answered, maybe by somebody before; asked on the first rank."""

    def read(self, job: str, number: int) -> Request:
        """Reads a request that the first rank has seen; every rank does.

        Raises:
            RequestError: if it is damaged: the same on every rank.
        """

    def answer(self, job: str, number: int, answer: Answer) -> None:
        """Has a request answered, unless it was before; on the first rank. Does not wait."""

    def flush(self, job: str | None) -> None:
        """Waits until the answers so far are on the disk; any thread of the first rank.

        Args:
            job: None = those of all.
        """

    def covered(self, job: str, number: int) -> None:
        """Hears that a checkpoint counts all requests up to a number; on the first rank."""

    def state_folder(self, path: str) -> Path:
        """The folder of a state that `save_state` answered as `path`."""


class NoClients:
    """Stands where no job is driven."""

    def has_request(self, job: str, number: int) -> bool:
        """No."""
        return False

    def is_answered(self, job: str, number: int) -> bool:
        """No."""
        return False

    def read(self, job: str, number: int) -> Request:
        """Never called."""
        raise AssertionError("nobody has asked")

    def answer(self, job: str, number: int, answer: Answer) -> None:
        """Never called."""

    def flush(self, job: str | None) -> None:
        """Nothing is under way."""

    def covered(self, job: str, number: int) -> None:
        """Nothing is kept."""

    def state_folder(self, path: str) -> Path:
        """Never called."""
        raise AssertionError("nobody has asked")
