"""A PostgreSQL server of our own, in a temporary folder, reached by a Unix socket only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers.launch import HANG_S, wait_until

_NEWEST_FIRST = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _program(name: str) -> str:
    places = os.pathsep.join([os.environ.get("PATH", ""), *map(str, _NEWEST_FIRST)])
    found = shutil.which(name, path=places)
    if found is None:
        pytest.skip(f"needs PostgreSQL's {name} (Debian: apt install postgresql)")
    return found


def _user() -> str | None:
    """Whom the server runs as: it refuses root. None: this user."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("needs a user postgres or nobody, since PostgreSQL refuses root")


class Server:
    """A server's process, which may be killed and started again; `url` is that of its database."""

    def __init__(self, command: list[str], folder: Path, user: str | None) -> None:
        self.url = f"postgresql+psycopg://tlora@/postgres?host={folder}"
        self._command, self._folder, self._user = command, folder, user

    def start(self) -> None:
        """Returns when it answers."""
        import psycopg

        log = self._folder / "log"
        with log.open("a") as out:
            self._process = subprocess.Popen(
                self._command, user=self._user, cwd=self._folder, stdout=out, stderr=out
            )

        def answers() -> bool:
            assert self._process.poll() is None, log.read_text()
            with suppress(psycopg.OperationalError):
                psycopg.connect(f"host={self._folder} user=tlora dbname=postgres").close()
                return True
            return False

        wait_until(answers, "the server's first answer", log.read_text)

    def kill(self) -> None:
        """Ends it as a fall of its machine would."""
        parts = psutil.Process(self._process.pid).children()
        self._process.kill()
        self._process.wait(HANG_S)
        for part in parts:
            with suppress(psutil.NoSuchProcess):
                part.kill()
        psutil.wait_procs(parts, HANG_S)

    def stop(self) -> None:
        """Ends it at once: it waits for no client."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(HANG_S)


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Starts a server; stops it by its process id."""
    initdb, postgres, user = _program("initdb"), _program("postgres"), _user()
    # A socket's path has at most 107 characters; pytest's folders are for this user alone.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as made:
        folder = Path(made)
        data, account = folder / "data", user or pwd.getpwuid(os.geteuid()).pw_name
        if user is not None:
            shutil.chown(folder, user)
        done = subprocess.run(
            [initdb, "-D", data, "-A", "trust", "-U", "tlora", "-E", "UTF8", "--no-sync"],
            user=user,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, f"as {account}: {done.stdout}{done.stderr}"
        words = ["-c", "listen_addresses=", "-k", str(folder), "-c", "max_connections=60"]
        server = Server([postgres, "-D", str(data), *words], folder, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def emptied(url: str) -> str:
    """Drops what a store has written there; returns the URL."""
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tlora CASCADE")
    return url
