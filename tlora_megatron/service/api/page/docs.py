"""`/docs`: one page for people, filled by the browser from `/openapi.json`."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

TAGS = [
    {"name": "jobs", "description": "Jobs as `tlora train` describes them: sent, seen, ended."},
    {"name": "files of jobs", "description": "Adapters and checkpoints, as zip archives."},
    {"name": "openai", "description": "What the `openai` client speaks."},
    {"name": "tinker", "description": "What the `tinker` client speaks."},
]
"""The order of the page, and a line for each part."""


def router() -> APIRouter:
    """The route of the page."""
    routes = APIRouter(include_in_schema=False)
    text = files(__package__).joinpath("assets/docs.html").read_text()
    headers = {"Content-Security-Policy": _policy(text), "X-Content-Type-Options": "nosniff"}

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)

    return routes


def _policy(text: str) -> str:
    """Lets the browser run the page's own script, and load nothing but the description."""
    hashes = {
        kind: " ".join(_hash(part) for part in re.findall(f"<{kind}>(.*?)</{kind}>", text, re.S))
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
