#!/usr/bin/env python3
"""Prints, one a line, what this interpreter lacks of the project's dependencies and extras.

The last line is `tlora-megatron` unless the project is installed from this very folder. Standard
library only, besides the `packaging` that every pip brings: it runs in an empty environment.

usage: missing_requirements.py [EXTRA]... | --build-backend
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement

REPO = Path(__file__).resolve().parent.parent


def required(project: dict[str, Any], extras: list[str]) -> Iterator[Requirement]:
    """The project's requirements with the extras, which may name other extras of the project.

    Raises:
        ValueError: if an extra is not one of the project's.
    """
    known = project["optional-dependencies"]
    lines = list(project["dependencies"])
    pending = list(extras)
    while pending:
        extra = pending.pop()
        if extra not in known:
            raise ValueError(f"extra must be one of {', '.join(known)}, got {extra!r}")
        lines.extend(known[extra])
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            yield from required({**project, "dependencies": []}, sorted(requirement.extras))
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def is_met(requirement: Requirement) -> bool:
    """True if a version that the requirement allows is installed."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def is_installed_from(repo: Path, name: str) -> bool:
    """True if the distribution is an editable install of this folder."""
    try:
        text = metadata.distribution(name).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    direct = json.loads(text or "{}")
    editable = direct.get("dir_info", {}).get("editable", False)
    return editable and direct.get("url") == repo.as_uri()


def main(argv: list[str]) -> int:
    """Prints what is missing; with --build-backend, answers by exit status whether that can run."""
    pyproject = tomllib.loads((REPO / "pyproject.toml").read_text())
    if argv == ["--build-backend"]:
        return int(not all(is_met(Requirement(r)) for r in pyproject["build-system"]["requires"]))
    project = pyproject["project"]
    try:
        lacks = sorted({str(r) for r in required(project, argv) if not is_met(r)})
    except ValueError as error:
        sys.exit(str(error))
    if not is_installed_from(REPO, project["name"]):
        lacks.append(project["name"])
    print("\n".join(lacks), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
