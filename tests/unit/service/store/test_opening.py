"""Files and URLs that can be stores, and what a store says of its disk, its age and its user."""

from __future__ import annotations

import os
import select
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import event

from tests.helpers.launch import HANG_S
from tests.unit.service.store.test_store import new, submitted
from tlora_megatron.service.store import (
    LockHeld,
    NewJob,
    Store,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnreachable,
    open_store,
)
from tlora_megatron.service.store import store as opening


def test_the_files_are_the_users_alone(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").touch(0o644)
    with open_store(tmp_path / "store.sqlite") as store:
        submitted(store)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    names = ["store.sqlite", "store.sqlite-shm", "store.sqlite-turn", "store.sqlite-wal"]
    assert modes == dict.fromkeys(names, 0o600)


def test_every_commit_is_on_the_disk(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store, store.database.write() as connection:
        read = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert read == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


@pytest.mark.parametrize(
    ("place", "error", "sentence"),
    [
        ("mysql://localhost/x", ValueError, r"a file or postgresql\+psycopg://..., got mysql://"),
        ("postgresql://me:secret@h:port/x", ValueError, "got a URL that cannot be read"),
        ("{tmp}/no/store", StoreUnreachable, "a file that can be opened, got No such file"),
        ("{tmp}", StoreUnreachable, "a file that can be opened, got Is a directory"),
        ("{tmp}/link", StoreUnreachable, "got Too many levels of symbolic links"),
        (
            "{tmp}/text",
            StoreUnreachable,
            "must be a whole SQLite database, got 'file is not a database'",
        ),
        ("{tmp}/damaged", StoreUnreachable, "must be a whole SQLite database, got 'database"),
        (
            "postgresql://me:secret@/x?host={tmp}",
            StoreUnreachable,
            r"the store postgresql\+psycopg://me:\*\*\*@/x must be a store that can be reached",
        ),
    ],
)
def test_what_cannot_be_a_store(
    tmp_path: Path, place: str, error: type[Exception], sentence: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text").write_text("no database" * 1000)
    open_store(tmp_path / "damaged").close()
    content = (tmp_path / "damaged").read_bytes()
    (tmp_path / "damaged").write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(error, match=sentence) as caught:
        open_store(place.format(tmp=tmp_path))
    assert "secret" not in str(caught.value)


def test_a_disk_of_several_hosts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "20 1 8:1 / / rw - ext4 /dev/vda rw\n"
        f"21 20 0:5 / {tmp_path}/my\\040home rw shared:1 - nfs4 server:/home rw\n"
    )
    assert opening.disk_kind(tmp_path / "my home" / "x", mounts) == "nfs4"
    assert opening.disk_kind(tmp_path / "my home2", mounts) == "ext4"
    assert opening.disk_kind(tmp_path, tmp_path / "missing") == ""
    monkeypatch.setattr(opening, "disk_kind", lambda _: "nfs4")
    with pytest.raises(StoreUnreachable, match=r"on nfs4: name a folder elsewhere, or give a Post"):
        open_store(tmp_path / "store.sqlite")


def test_a_newer_store_is_refused_and_an_older_one_brought_up(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(place) as store:
        submitted(store)
    add = "ALTER TABLE decision ADD COLUMN cost INTEGER"
    with monkeypatch.context() as newer:
        steps = [*opening.STEPS, lambda connection: connection.exec_driver_sql(add)]
        newer.setattr(opening, "STEPS", steps)
        for _ in range(2):
            with open_store(place) as store, store.database.read() as connection:
                connection.exec_driver_sql("SELECT cost FROM decision")
                assert store.jobs.find("a").number == 1
    now = opening.newest()
    match = f"must have tables of version {now} or older, got {now + 1}: a newer"
    with pytest.raises(StoreError, match=match):
        open_store(place)


def test_a_store_of_the_first_version_is_brought_up(place: str) -> None:
    with open_store(place) as store:
        submitted(store)
        with store.database.write() as connection:
            for index in ("gang_by_end", "lease_by_end"):
                connection.exec_driver_sql(f"DROP INDEX {index}")
            newer = ("board", "tenant", "token", "upload")
            for table in (*newer, "checkpoint_note", "model", "sampler", "session"):
                connection.exec_driver_sql(f"DROP TABLE {table}")
            connection.exec_driver_sql("ALTER TABLE job ADD COLUMN folder TEXT")
            connection.exec_driver_sql("ALTER TABLE job DROP COLUMN removed_at")
            connection.exec_driver_sql("UPDATE schema_version SET version = 1")
    with open_store(place) as store:
        store.boards.write("cluster", {"nodes": []})
        secret = store.tokens.make("ann").secret
        assert store.jobs.find("a").number == 1
    with open_store(place) as store:
        assert store.boards.read()["cluster"].body == {"nodes": []}
        assert store.tokens.find(secret) is not None
        assert store.uploads.page(tenant="ann") == []


def test_a_full_disk_refuses_a_submit_and_keeps_all_before_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        engine = store.database.writer

        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA max_page_count = {pages}")

        event.listen(engine, "connect", limit)
        pages = 80
        engine.dispose()
        with pytest.raises(StoreFull, match="must have room, got 'database or disk is full': noth"):
            _submit_many(store)
        accepted = sum(store.jobs.counts().values())
        assert store.events.last() == accepted > 0
        with pytest.raises(StoreError, match="must end with its first error of the database"):
            _go_on_after_full(store)
        assert store.events.last() == accepted, "nothing of it was kept"
        pages = 1000
        engine.dispose()
        assert store.jobs.submit([large(accepted)])[0].is_new, "the same one, with room again"


def large(number: int, letter: str = "n") -> NewJob:
    return new(f"{letter}{number}", document={"text": "x" * 2000})


def _go_on_after_full(store: Store) -> None:
    with store.transaction():
        store.events.add("note")
        with suppress(StoreFull):
            _submit_many(store, "m")
        store.events.add("note")


def _submit_many(store: Store, letter: str = "n") -> None:
    for number in range(1000):
        store.jobs.submit([large(number, letter)])


def test_a_disk_that_refuses_to_grow_a_file(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from tests.unit.service.store.test_opening import large\n"
        "from tlora_megatron.service.store import StoreFull, open_store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = open_store(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))\n"
        "try:\n    for n in range(1000):\n        store.jobs.submit([large(n)])\n"
        "except StoreFull as error:\n    print(n, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "s"], capture_output=True, text=True, timeout=HANG_S
    )
    accepted, _, sentence = done.stdout.partition(" ")
    assert "must take writes, got 'disk I/O error' (SQLITE_IOERR_WRITE)" in sentence, done.stderr
    with open_store(tmp_path / "s") as store:
        assert sum(store.jobs.counts().values()) == int(accepted) > 0


def test_a_forked_child_must_open_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            store.jobs.counts()
        except StoreError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert f"in process {child}: open it after the fork" in told.read()
    assert store.jobs.counts() == {}
    store.close()


def test_threads_take_turns_and_a_holder_is_not_waited_for_forever(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "BUSY_S", 0.01)
    monkeypatch.setattr(opening, "CHECKPOINT_S", 0.01)
    with open_store(place) as store:
        with store.transaction():
            refused = _in_thread(lambda: submitted(store, "b"))
        assert isinstance(refused, StoreBusy)
        assert "another process holds it" in str(refused)
        assert _in_thread(lambda: submitted(store, "b")) is None, "given up, not lost"
    monkeypatch.setattr(opening, "BUSY_S", HANG_S)
    with open_store(place) as store:
        names = [f"{letter}{number}" for letter in "cdef" for number in range(5)]
        threads = [threading.Thread(target=submitted, args=(store, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        assert sum(store.jobs.counts().values()) == 1 + len(names)


def _in_thread(call: Callable[[], object]) -> Exception | None:
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(HANG_S)
    return raised[0] if raised else None


def test_the_lock_of_a_dead_process_is_taken_at_once(place: str) -> None:
    code = (
        "import sys, time\n"
        "from tlora_megatron.service.store import open_store\n"
        "print(open_store(sys.argv[1]).lock.take(), flush=True)\n"
        "time.sleep(3600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"
    with open_store(place) as store:
        with pytest.raises(LockHeld, match=f"got process {process.pid} of "):
            store.lock.take()
        process.kill()
        process.wait(HANG_S)
        assert not store.lock.is_held()
        assert store.lock.take() == 2
    process.stdout.close()


def test_a_writer_that_does_nothing_is_cut_off(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "IDLE_S", 2.0)  # an open that is kept waiting must live
    with open_store(server) as store:
        with pytest.raises(StoreUnreachable, match="idle-in-transaction timeout"):
            _do_nothing(store)
        assert store.jobs.counts() is not None


def _do_nothing(store: Store) -> None:
    with store.transaction(), store.database.read() as connection:
        # The server answers once it has ended the session.
        select.select([connection.connection.fileno()], [], [], HANG_S)
        store.events.add("too late")


def test_a_server_that_went_away_is_reached_again(server: str) -> None:
    with open_store(server) as store, open_store(server) as other:
        with pytest.raises(StoreUnreachable, match="that can be reached, got 'terminating conn"):
            _cut_off(store, other)
        assert store.jobs.counts() == other.jobs.counts()


def _cut_off(store: Store, other: Store) -> None:
    pid = "SELECT pg_backend_pid()"
    with store.transaction(), store.database.read() as mine:
        found = mine.exec_driver_sql(pid).scalar()
        with other.database.read() as connection:
            connection.exec_driver_sql(f"SELECT pg_terminate_backend({found}, 10000)")
        store.events.add("lost")


def test_hosts_whose_clocks_disagree_share_the_server_s(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    with open_store(server) as here:
        here.events.add("here")
        monkeypatch.setattr(time, "time", lambda: real() - 7200.0)
        with open_store(server) as elsewhere:
            elsewhere.events.add("elsewhere")
            first, second = elsewhere.events.after(here.events.last() - 2)
    assert abs(second.at - first.at) < 1800.0
