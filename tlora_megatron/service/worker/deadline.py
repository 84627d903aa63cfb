"""Until when a gang may write into the folders of its jobs."""

from __future__ import annotations

import time


class Deadline:
    """The end of a gang's lease, which every word of a controller puts off.

    A controller that has lost sight of a gang gives its jobs away once the lease is over. A process
    that was stopped for so long must not take the mail that lay there for a sign of life: commands
    renew the lease from the last look that did *not* find them.

    Args:
        lease_s: seconds from one sign of life of the controller to the end.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._looked_s = now_s()
        self._end_s = self._looked_s + lease_s

    def looked(self, *, found: bool) -> None:
        """Notes a look for commands, and whether it found some."""
        if found and not self.is_over:
            self._end_s = self._looked_s + self._lease_s
        self._looked_s = now_s()

    @property
    def is_over(self) -> bool:
        """True once nothing has been heard of a controller for the lease's time."""
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        """Seconds to the end."""
        return self._end_s - now_s()


def now_s() -> float:
    """A clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
