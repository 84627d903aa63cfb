"""Addresses of services, and where a client finds its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora_megatron.client.calls import check_address, find_token


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TLORA_TOKEN", raising=False)
    (tmp_path / ".tlora").mkdir()
    return tmp_path / ".tlora"


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def test_a_token_comes_from_the_environment_first(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(own_home / "token", "from a file\n")
    assert find_token("https://far") == "from a file"
    monkeypatch.setenv("TLORA_TOKEN", " from the environment ")
    assert find_token("https://far") == "from the environment"


@pytest.mark.parametrize("host", ["127.0.0.1:8017", "localhost", "[::1]:1"])
def test_the_service_s_own_token_goes_nowhere_else(own_home: Path, host: str) -> None:
    write(own_home / "http_token", "own")
    assert find_token(f"http://{host}") == "own"
    with pytest.raises(ValueError, match=r"a token for http://far must be given, got none"):
        find_token("http://far")


def test_files_must_be_closed_and_hold_something(own_home: Path) -> None:
    write(own_home / "token", "x", 0o640)
    with pytest.raises(ValueError, match="must be closed to other users, got mode 0640"):
        find_token("http://far")
    write(own_home / "token", " \n")
    with pytest.raises(ValueError, match="must hold a token, got an empty file"):
        find_token("http://far")


def test_addresses() -> None:
    assert check_address("http://host:8017/") == "http://host:8017"
    assert check_address("https://host/lora/") == "https://host/lora"


@pytest.mark.parametrize(
    "address", ["host:8017", "ftp://host", "http://", "http://h:x", "file:///"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="the service must be like http://host:8017"):
        check_address(address)


def test_no_secrets_in_addresses() -> None:
    with pytest.raises(ValueError, match="must hold neither user nor query, got one of host") as e:
        check_address("http://me:secret@host")
    assert "secret" not in str(e.value)
