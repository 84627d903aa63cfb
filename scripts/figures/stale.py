"""Which figures are of rows older than the last change of the folders that they measure."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from scripts.figures.check import Figure, Report


def stale_lines(repo: Path, report: Report) -> Iterator[str]:
    """A line for every file and commit of rows that are stale, and below it its figures."""
    figures: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in report.figures:
        for row in figure.rows:
            figures[row].append(figure)
    for (name, commit), own in sorted(figures.items()):
        folders = report.measures.get(name, [])
        why = _why_stale(repo, commit, folders)
        if why:
            yield f"{name}.csv  {commit or '-'}  {len(own)} figures  {why}"
            yield from _by_section(own)


def _why_stale(repo: Path, commit: str, folders: list[str]) -> str:
    """What makes rows of a commit stale, in a few words; empty if nothing does."""
    if not commit:
        return "the rows name no commit"
    if _git(repo, "rev-parse", "--git-dir") is None:
        return "there is no git here, so nobody knows"
    known = commit.rstrip("+")  # a "+" marks a tree with changes on top of the commit
    if _git(repo, "cat-file", "-e", f"{known}^{{commit}}") is None:
        return "the commit is not in this clone, so nobody knows"
    # Counted by what HEAD has and the commit has not: it need not be one of HEAD's ancestors.
    changes = _git(repo, "rev-list", "--count", f"{known}..HEAD", "--", *folders)
    if changes == "0":
        return ""
    return f"{changes} later changes of {', '.join(folders)}"


def _git(repo: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=repo, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _by_section(figures: list[Figure]) -> Iterator[str]:
    texts: dict[str, list[str]] = defaultdict(list)
    for figure in figures:
        texts[f"{figure.place.page}, {figure.place.section}"].append(figure.text)
    for section, found in texts.items():
        yield f"    {section}: {'; '.join(found)}"
