"""The page: one file that loads nothing, put together from its style, its markup and its script.

Its policy lets the browser run this very script and use this very style, and connect to the
service that sent it; whatever a name of a job may hold is text.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

_SCRIPTS = ("text", "stream", "charts", "machines", "groups", "jobs", "decisions", "main")
"""Parts of the script in the order in which they need each other."""


@cache
def page() -> str:
    """The whole page."""
    return _read("page.html").replace("{style}", _style()).replace("{script}", _script())


def policy() -> str:
    """The content security policy: the limits of the page in the browser."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(_script())}'",
            f"style-src '{_digest(_style())}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


@cache
def _style() -> str:
    shared = files("tlora_megatron.page").joinpath("page.css").read_text(encoding="utf-8")
    return shared + _read("live.css") + _read("parts.css")


@cache
def _script() -> str:
    """All parts in one function's scope: nothing of them is global."""
    parts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";(() => {{\n{parts}\n}})();'


def _read(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS = {
    "Content-Security-Policy": policy(),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
