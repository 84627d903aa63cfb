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


@contextmanager
def postgres_server() -> Iterator[str]:
    """Starts a server; yields the URL of a database of it; stops it by its process id."""
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
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                [postgres, "-D", data, *words], user=user, cwd=folder, stdout=log, stderr=log
            )
        try:
            _wait(server, folder)
            yield f"postgresql+psycopg://tlora@/postgres?host={folder}"
        finally:
            # At once: it waits for no client.
            server.send_signal(signal.SIGQUIT)
            server.wait(HANG_S)


def emptied(url: str) -> str:
    """Drops what a store has written there; returns the URL."""
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tlora CASCADE")
    return url


def _wait(server: subprocess.Popen[bytes], folder: Path) -> None:
    import psycopg

    log = folder / "log"

    def answers() -> bool:
        assert server.poll() is None, log.read_text()
        with suppress(psycopg.OperationalError):
            psycopg.connect(f"host={folder} user=tlora dbname=postgres").close()
            return True
        return False

    wait_until(answers, "the server's first answer", log.read_text)
