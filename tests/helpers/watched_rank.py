"""A rank that only watches the others: `python -m tests.helpers.watched_rank STORE RANK`.

It says that it is in, and leaves when it is told a line. It imports little: tests start many.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tlora_megatron.service.worker.peers import peer_watchdog


class FileStore:
    """A store with only what a watchdog needs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, key: str, value: str) -> None:
        self.path.with_suffix(".new").write_text(value)
        self.path.with_suffix(".new").rename(self.path)

    def get(self, key: str) -> bytes:
        while not self.path.exists():
            time.sleep(0.005)
        return self.path.read_bytes()


def main() -> None:
    store, rank = FileStore(Path(sys.argv[1])), int(sys.argv[2])
    with peer_watchdog(store, rank, 3, "127.0.0.1", lambda: None):  # type: ignore[arg-type]
        print("in", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
