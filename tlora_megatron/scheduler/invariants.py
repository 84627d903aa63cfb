"""Invariants of the scheduler state: a broken one is a bug, never a user's error."""

from __future__ import annotations


class InvariantError(RuntimeError):
    """The scheduler state is inconsistent: a bug in how it is kept, or in a policy."""


def require(holds: bool, sentence: str) -> None:
    """Checks an invariant.

    Raises:
        InvariantError: with the given sentence, if it does not hold.
    """
    if not holds:
        raise InvariantError(sentence)
