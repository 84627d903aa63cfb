"""The pages a reader opens: links lead somewhere, names are those of the tree, the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import configuration_page, docs_site
from tests.helpers.launch import HANG_S

REPO = Path(__file__).resolve().parents[3]
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"(?<![\w./-])((?:tlora_megatron|scripts|tests|configs|csrc)/[\w./-]*[\w/])")


def _pages() -> list[str]:
    found = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]
    for folder in ("configs", "scripts", "tests"):
        found += REPO.glob(f"{folder}/**/*.md")
    return sorted(str(path.relative_to(REPO)) for path in found)


PAGES = _pages()


def _slugs(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs agree on them for plain headings."""
    headings = re.findall(r"^#+ (.*)$", _CODE_BLOCK.sub("", text), re.MULTILINE)
    bare = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", words) for words in bare}


def _broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere: no such file, or no such heading in it."""
    broken = []
    for link in docs_site.links(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page.parent / path if path else page
        known = target.is_file() and (not anchor or anchor in _slugs(target.read_text("utf-8")))
        if not known:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: str) -> None:
    assert _broken(REPO / page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, plain\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](gone.md) [c](there.md#a-heading-plain) [d](there.md#gone) ![e](gone.png)"
        "\n`[f](code.md)`\n```\n[g](block.md)\n```\n[h](https://example.org) [i](#gone)\n"
    )
    assert _broken(page) == ["gone.md", "there.md#gone", "gone.png", "#gone"]


def test_the_readme_is_short() -> None:
    lines = (REPO / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 175
    assert [line for line in lines if len(line) > 140] == []


@pytest.mark.parametrize("page", PAGES)
def test_prose_fits_a_window(page: str) -> None:
    """Tables and output that was copied may be wider than 140 characters; sentences may not."""
    text = _CODE_BLOCK.sub("", (REPO / page).read_text(encoding="utf-8"))
    wide = [x for x in text.splitlines() if len(x) > 140 and not x.startswith(("|", "!["))]
    assert wide == []
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE), "a merge was left half done"


def test_the_readme_names_the_two_commands() -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert "\n./scripts/quickstart.sh " in text
    assert "\n./scripts/test.sh " in text


@pytest.mark.parametrize("page", [p for p in PAGES if not p.startswith("docs/measurements/")])
def test_files_that_a_page_names_are_in_the_tree(page: str) -> None:
    """A page that tells what was measured, or what changed, may name files of an earlier commit."""
    if page in ("CHANGELOG.md", "docs/benchmarks.md"):
        pytest.skip("names files of earlier commits")
    text = (REPO / page).read_text(encoding="utf-8")
    named = {name.rstrip("/") for name in _PATH.findall(text)}
    assert sorted(name for name in named if not (REPO / name).exists()) == []


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((REPO / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {str(path.relative_to(REPO / "docs")) for path in (REPO / "docs").rglob("*.md")}
    copied = {f"repository/{name}" for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    assert set(_entries(nav)) == pages | copied


def _entries(nav: str | list[Any] | dict[str, Any]) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from _entries(part)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the docs extra: pip install '.[docs]'")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "index.html").is_file()
    assert (tmp_path / "repository" / "CONTRIBUTING" / "index.html").is_file()


def test_the_configuration_page_is_what_the_classes_say() -> None:
    written = configuration_page.PAGE.read_text(encoding="utf-8")
    assert written == configuration_page.page(), "run scripts/configuration_page.py"
