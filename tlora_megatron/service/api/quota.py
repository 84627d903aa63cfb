"""How many bytes a tenant has on the service's disk: uploads, and what doors keep for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tlora_megatron.service.store import OverLimit, Store

MEASURED_S = 15.0
"""What doors keep is measured anew after so long; between, what is written is added."""


class Quota:
    """Holds tenants to the bytes that they may have; may be used by several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._measures: list[Callable[[str], int]] = []
        self._guard = threading.Lock()
        self._known: dict[str, tuple[float, int]] = {}

    def add_measure(self, measure: Callable[[str], int]) -> None:
        """Counts what a door keeps for a tenant beside its uploads, in bytes."""
        self._measures.append(measure)

    def beside_uploads(self, tenant: str, *, fresh: bool = False) -> int:
        """Bytes that doors keep for a tenant.

        Args:
            fresh: measures now; else what is known may be `MEASURED_S` old.
        """
        with self._guard:
            measured_s, size = self._known.get(tenant, (float("-inf"), 0))
        if not fresh and time.monotonic() < measured_s + MEASURED_S:
            return size
        now_s = time.monotonic()
        size = sum(measure(tenant) for measure in self._measures)
        with self._guard:
            self._known[tenant] = now_s, size
        return size

    def check(self, tenant: str, size: int) -> None:
        """Refuses bytes for which a tenant has no room.

        Raises:
            OverLimit: saying how much it has.
        """
        most = self._store.tenants.limits(tenant).upload_bytes
        uploads = self._store.uploads.bytes_of(tenant)
        if uploads + self.beside_uploads(tenant) + size <= most:
            return
        held = uploads + self.beside_uploads(tenant, fresh=True)  # a checkpoint may have made room
        if held + size > most:
            raise OverLimit(
                f"the files and requests of a tenant must have at most {most:,} bytes together, "
                f"got {held:,} and {size:,} more: checkpoints and a day's time free requests"
            )

    def note(self, tenant: str, size: int) -> None:
        """Counts bytes that were written just now."""
        with self._guard:
            measured_s, known = self._known.get(tenant, (float("-inf"), 0))
            self._known[tenant] = measured_s, known + size
