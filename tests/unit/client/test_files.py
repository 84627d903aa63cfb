"""Addresses, tokens and archives of the client."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tlora_megatron.client import Client, values
from tlora_megatron.client.calls import check_address, find_token


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("TLORA_TOKEN", raising=False)
    (home / ".tlora").mkdir()
    return home / ".tlora"


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


Fill = Callable[[zipfile.ZipFile], None]


def packed(fill: Fill) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as opened:
        fill(opened)
    return found.getvalue()


def adapter(opened: zipfile.ZipFile) -> None:
    opened.writestr("adapter_config.json", "{}")
    opened.writestr("adapter_model.safetensors", b"weights")


def link(opened: zipfile.ZipFile) -> None:
    entry = zipfile.ZipInfo("adapter_config.json")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    opened.writestr(entry, "/etc/passwd")


def named(name: str) -> Fill:
    return lambda opened: opened.writestr(name, "x")


def twice(opened: zipfile.ZipFile) -> None:
    opened.writestr("a", "x")
    with pytest.warns(UserWarning, match="Duplicate name"):
        opened.writestr("a", "y")


def unpack(content: bytes, folder: Path) -> Path:
    path = folder / "a.zip"
    path.write_bytes(content)
    values.unpack(path, folder / "out")
    return folder / "out"


def test_an_adapter_is_downloaded(tmp_path: Path) -> None:
    answers = [httpx.ReadError("cut"), httpx.Response(200, content=packed(adapter))]

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/jobs/a/adapter.zip"
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    with Client("http://127.0.0.1:1", "t", transport=httpx.MockTransport(answer)) as client:
        out = client.adapter("a", tmp_path / "out")
    assert (out / "adapter_model.safetensors").read_bytes() == b"weights"
    assert list(tmp_path.iterdir()) == [out], "nothing is left beside it"


@pytest.mark.parametrize(
    ("fill", "told"),
    [
        (named("../x"), "must consist of plain files"),
        (named("/x"), "must consist of plain files"),
        (named("a/b"), "must consist of plain files"),
        (named("a\\b"), "must consist of plain files"),
        (named(".hidden"), "must consist of plain files"),
        (named("folder/"), "must consist of plain files"),
        (link, "must consist of plain files"),
        (twice, "1 to 64 files of unlike names, got 2"),
        (lambda opened: None, "1 to 64 files of unlike names, got 0"),
        (
            lambda opened: [opened.writestr(str(n), "") for n in range(65)] and None,
            "1 to 64 files of unlike names, got 65",
        ),
    ],
)
def test_evil_archives(tmp_path: Path, fill: Fill, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        unpack(packed(fill), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_sizes_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_MOST_BYTES", 3)
    with pytest.raises(ValueError, match="must have at most 3 bytes"):
        unpack(packed(adapter), tmp_path)


def test_what_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must come as a zip archive"):
        unpack(b"no", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="must not exist yet"):
        unpack(packed(adapter), tmp_path)
    with pytest.raises(ValueError, match="must lie in one that exists"):
        values.check_target(tmp_path / "no" / "out")
