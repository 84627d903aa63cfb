"""Where a service is, and with which token it lets a client in."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

TOKEN_VARIABLE = "TLORA_TOKEN"
TOKEN_FILE = "~/.tlora/token"
"""Holds the token, closed to other users, where the variable is not set."""
OWN_TOKEN_FILE = "~/.tlora/http_token"
"""The file that `tlora serve --http` makes; for services of this host alone."""


def is_address(service: str) -> bool:
    """True of `http://...` and `https://...`: a service over HTTP and no folder."""
    return service.startswith(("http://", "https://"))


def check_address(address: str) -> str:
    """The address without what follows host, port and path.

    Raises:
        ValueError: if it is none, or holds a password.
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if not is_address(address) or not parts.hostname or port == 0:
        raise ValueError(f"the service must be like http://host:8017, got {address!r:.200}")
    if parts.username or parts.query:
        raise ValueError(
            f"the address of a service must hold neither user nor query, got one of "
            f"{parts.hostname}: the token comes from {TOKEN_VARIABLE} or {TOKEN_FILE}"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def find_token(address: str) -> str:
    """The token for a service: from the environment, or a file that nobody else can read.

    Raises:
        ValueError: if there is none, or others can read the file.
    """
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if given:
        return given
    places = [TOKEN_FILE, OWN_TOKEN_FILE] if _is_here(address) else [TOKEN_FILE]
    for place in places:
        path = Path(place).expanduser()
        if path.is_file():
            return _read(path)
    raise ValueError(
        f"a token for {address} must be given, got none: set {TOKEN_VARIABLE}, or write it into "
        f"{TOKEN_FILE} with mode 0600; `tlora token create` makes one"
    )


def _read(path: Path) -> str:
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ValueError(
            f"{path} must be closed to other users, got mode "
            f"{stat.S_IMODE(path.stat().st_mode):04o}; chmod 600 closes it"
        )
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"{path} must hold a token, got an empty file")
    return token


def _is_here(address: str) -> bool:
    """True of addresses that lead to this host alone."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
