"""Ends what clients of the SDK do by themselves: they never stop sending heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tinker.lib.internal_client_holder import InternalClientHolder


@contextmanager
def closing_clients() -> Iterator[None]:
    """Closes all clients that are made in this process meanwhile, without a word to the service."""
    made: list[InternalClientHolder] = []
    init = InternalClientHolder.__init__

    def noted(self: InternalClientHolder, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InternalClientHolder, "__init__", noted)
        yield
    for holder in made:
        holder.close()
