"""Invariants of the books of simulator and service: a broken one is a bug, never a user's error."""

from __future__ import annotations


class InvariantError(RuntimeError):
    """The books do not balance: a bug of the bookkeeping or of a policy."""


def require(holds: bool, sentence: str) -> None:
    """Checks an invariant.

    Raises:
        InvariantError: with the given sentence, if it does not hold.
    """
    if not holds:
        raise InvariantError(sentence)
