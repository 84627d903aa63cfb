"""A service over HTTP in a process of its own, with tenants and their tokens.

python -m scripts.bench.doors.serving FOLDER BASE_FOLDER      # prints its port
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tlora_megatron.service.home import Home
from tlora_megatron.service.settings import declare_bases
from tlora_megatron.service.store import Store, open_store

BASE = "base"
"""Name of the base that it offers."""
QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart/base"


class Served(NamedTuple):
    home: Home
    store: Store
    address: str
    process: psutil.Process

    @property
    def cpu_s(self) -> float:
        taken = self.process.cpu_times()
        return float(taken.user + taken.system)

    def tokens(self, count: int) -> list[str]:
        return [self.store.tokens.make(f"tenant-{number}").secret for number in range(count)]


@contextmanager
def serving(root: Path, base: Path = QUICKSTART) -> Iterator[Served]:
    """Serves a folder with a base, and no controller."""
    home = Home.open(root)
    command = [sys.executable, "-m", __spec__.name, str(root), str(base)]
    with open_store(home.store) as store:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None, "a pipe must be there"
        try:
            port = process.stdout.readline().strip()
            assert port, "the server must start, got one that has ended"
            address = f"http://127.0.0.1:{port}"
            yield Served(home, store, address, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    from tlora_megatron.service.api.server import make_app, make_server, prepare_process
    from tlora_megatron.service.api.service import Service
    from tlora_megatron.service.front import Place, listen

    home = Home.open(Path(sys.argv[1]))
    declare_bases(home, [f"{BASE}={sys.argv[2]}"])
    with open_store(home.store) as store:
        server = make_server(make_app(Service.of(home, store)))
        prepare_process()
        socket = listen(Place("127.0.0.1", 0))
        print(socket.getsockname()[1], flush=True)
        server.run(sockets=[socket])


if __name__ == "__main__":
    main()
