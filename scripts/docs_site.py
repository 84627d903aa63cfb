"""Lets pages of the documentation site link to files outside docs/, such as sources and CSV files.

mkdocs loads this file as a hook (mkdocs.yml). Pages are written so that their links work where the
repository is browsed, such as `../CONTRIBUTING.md`. A site knows the files of docs/ only, so the
hook copies every file that a page links to into the folder `repository/` of the site and turns the
links there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPO = Path(__file__).resolve().parents[1]
_COPIES = "repository"
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def links(text: str) -> Iterator[str]:
    """The targets of all links and images of a Markdown text, without those in code."""
    for part in _CODE.split(text)[::2]:
        for match in _LINK.finditer(part):
            yield match[2]


def is_relative(target: str) -> bool:
    """True for a link to a file of the repository, False for a URL or a heading of the page."""
    return not target.startswith(("#", "mailto:")) and "://" not in target


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every file outside docs/ that a page links to, directly or through such a file."""
    from mkdocs.structure.files import File

    pending = [f"docs/{page.src_uri}" for page in files.documentation_pages()]
    known = set(pending)
    while pending:
        source = pending.pop()
        for target in _targets(source) - known:
            known.add(target)
            if target.startswith("docs/"):
                continue
            files.append(File.generated(config, _site(target), abs_src_path=str(REPO / target)))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page to where their targets are in the site."""
    source = _repository(page.file.src_uri)
    return _with_links(markdown, lambda target: _turned(target, source))


def _with_links(text: str, turn: Callable[[str], str]) -> str:
    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(lambda m: m[1] + turn(m[2]) + m[3], part) for part in parts[::2]]
    return "".join(parts)


def _turned(target: str, source: str) -> str:
    if not is_relative(target):
        return target
    path, mark, anchor = target.partition("#")
    folder = os.path.dirname(_site(source))
    return os.path.relpath(_site(_resolved(path, source)), folder or ".") + mark + anchor


def _targets(source: str) -> set[str]:
    """The files of the repository that a page links to; a folder or a missing file is left out."""
    text = (REPO / source).read_text(encoding="utf-8")
    found = {_resolved(link.partition("#")[0], source) for link in links(text) if is_relative(link)}
    return {path for path in found if (REPO / path).is_file()}


def _resolved(target: str, source: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(source), target))


def _site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{_COPIES}/{path}"


def _repository(site: str) -> str:
    """The file of the repository that lies there in the site."""
    copied = site.startswith(f"{_COPIES}/")
    return site.removeprefix(f"{_COPIES}/") if copied else f"docs/{site}"
