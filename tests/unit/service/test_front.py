"""The process of HTTP beside a controller: it starts, dies, starts again, and ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.helpers.http_service import bearer
from tests.helpers.launch import HANG_S
from tlora_megatron.config.reader import ConfigError
from tlora_megatron.service.front import TOKEN_NAME, Front, Place, listen, own_token
from tlora_megatron.service.home import Home
from tlora_megatron.service.store import open_store


def _until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + HANG_S
    while not done():
        assert time.monotonic() < end_s, "it must happen before the test is given up"
        time.sleep(0.02)


def test_a_process_that_is_killed_starts_again_and_no_connection_is_refused(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "service")
    listener = listen(Place("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/jobs"
    said: list[str] = []
    with open_store(home.store) as store:
        token = own_token(home, store)
        with Front(home, listener, words=["--sampler", "off"], say=said.append) as front:
            answer = httpx.get(url, headers=bearer(token), timeout=HANG_S)
            assert answer.json()["jobs"] == []
            assert front.child is not None
            first = front.child.pid
            os.kill(first, signal.SIGKILL)
            answer = httpx.get(url, headers=bearer(token), timeout=HANG_S)
            assert answer.status_code == 200
            assert said == ["the process of HTTP ended with code -9: it starts again"]
            second = front.child.pid
        assert second != first
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)


def test_the_process_ends_with_a_controller_that_was_killed(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "service")
    open_store(home.store).close()
    listener = listen(Place("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/jobs"
    front = Front(home, listener, words=["--sampler", "off"], say=lambda _: None)
    front.__enter__()
    assert httpx.get(url, timeout=HANG_S).status_code == 401
    child = front.child
    assert child is not None
    front._stop.set()
    child.pipe.close()  # as the kernel does at the end of the process that holds it
    _until(lambda: child.exit_code is not None)
    front.__exit__(None, None, None)


def test_the_own_token_is_kept_and_made_anew_when_it_is_revoked(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "service")
    with open_store(home.store) as store:
        token = own_token(home, store)
        assert own_token(home, store) == token
        assert (home.root / TOKEN_NAME).stat().st_mode & 0o777 == 0o600
        found = store.tokens.find(token)
        assert found is not None
        assert (found.tenant, "admin" in found.scopes) == ("local", True)
        store.tokens.revoke(found.id)
        assert own_token(home, store) != token


@pytest.mark.parametrize(
    ("text", "place", "url", "is_loopback"),
    [
        ("8017", ("127.0.0.1", 8017), "http://127.0.0.1:8017", True),
        ("0.0.0.0:1", ("0.0.0.0", 1), "http://127.0.0.1:1", False),
        ("[::1]:80", ("::1", 80), "http://[::1]:80", True),
        ("host.lan:80", ("host.lan", 80), "http://host.lan:80", False),
    ],
)
def test_places(text: str, place: tuple[str, int], url: str, is_loopback: bool) -> None:
    found = Place.read(text)
    assert (tuple(found), found.url, found.is_loopback) == (place, url, is_loopback)


@pytest.mark.parametrize("text", ["", "http://a:1", "99999", "a:b", "::1:80"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--http must be PORT or HOST:PORT"):
        Place.read(text)


def test_a_port_that_is_taken_is_refused() -> None:
    taken = listen(Place("127.0.0.1", 0))
    with taken, pytest.raises(ConfigError, match=r"--http must be a free port of this host, got"):
        listen(Place("127.0.0.1", taken.getsockname()[1]))


def test_answers_do_not_wait_for_the_acknowledgement_of_their_first_part() -> None:
    with (
        listen(Place("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
