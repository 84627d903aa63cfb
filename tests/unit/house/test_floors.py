"""Imports go down only, and in no circle. Read with `ast`: nothing is imported, lazy ones count.

ground -> control tower: planner -> scheduler -> sim (no torch)
       -> compute tower: ops -> parallel -> layers -> training -> integrations
both towers -> runtime -> cli
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.launch import imported

PACKAGE = "tlora_megatron"
GROUND = ("timeline", "files", "channel", "append_log", "config", "model", "page")
CONTROL = ("planner", "scheduler", "sim")
COMPUTE = ("ops", "parallel", "layers", "training", "integrations")
ROOF = ("client", "runtime", "profiling", "service", "cli", "deepspeed", "launch", "autohook")
ONLY_IN: dict[str, tuple[str, ...]] = {
    "megatron.training": (f"{PACKAGE}.integrations.megatron_lm",),
    "megatron": (f"{PACKAGE}.integrations.megatron", f"{PACKAGE}.integrations.megatron_lm"),
    "deepspeed": (f"{PACKAGE}.integrations.deepspeed",),
    "sqlalchemy": (f"{PACKAGE}.service.store",),
    "psycopg": (f"{PACKAGE}.service.store",),
    "fastapi": (f"{PACKAGE}.service.api",),
    "starlette": (f"{PACKAGE}.service.api",),
    "uvicorn": (f"{PACKAGE}.service.api",),
    "pydantic": (f"{PACKAGE}.service.api", f"{PACKAGE}.integrations.deepspeed"),
    "tinker": (f"{PACKAGE}.service.api.tinker",),
    "google.protobuf": (f"{PACKAGE}.service.api.tinker.protobuf",),
    "ray": (f"{PACKAGE}.service.engines.ray.bridge",),
    f"{PACKAGE}.integrations.megatron.cpu": (
        f"{PACKAGE}.integrations.megatron",
        f"{PACKAGE}.integrations.megatron_lm.cpu",
    ),
}
"""Module -> the folders that may import it, lazily or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One import statement: `source` imports `target` (absolute dotted names)."""

    source: str
    target: str
    line: int
    at_import: bool
    """Runs when `source` is imported: not in a function, not under TYPE_CHECKING."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def below(part: str) -> frozenset[str]:
    """The parts that a part of the package may import, itself included.

    Raises:
        ValueError: if the part has no floor.
    """
    towers = {CONTROL: GROUND + CONTROL, COMPUTE: GROUND + COMPUTE}
    for tower, reachable in towers.items():
        if part in tower:
            return frozenset(reachable[: reachable.index(part) + 1])
    if part in GROUND:
        return frozenset(GROUND[: GROUND.index(part) + 1])
    if part in ROOF:
        return frozenset(GROUND + CONTROL + COMPUTE + ROOF[: ROOF.index(part) + 1])
    raise ValueError(f"{PACKAGE}.{part} must be given a floor in {Path(__file__).name}")


def modules_of(root: Path) -> dict[str, Path]:
    names = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports_of(root: Path) -> list[Import]:
    """Every import of every module, `from package import module` resolved to the module."""
    modules = modules_of(root)
    found = []
    for name, path in modules.items():
        is_package = path.name == "__init__.py"
        tree = ast.parse(path.read_text(), filename=str(path))
        for node, at_import in _statements(tree):
            for target in _targets(node, name, is_package=is_package, modules=modules):
                found.append(
                    Import(source=name, target=target, line=node.lineno, at_import=at_import)
                )
    return found


def _statements(
    node: ast.AST, *, at_import: bool = True
) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    """Yields imports and calls, with `Import.at_import`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, at_import
        lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _statements(child, at_import=at_import and not (lazy or typing))


def _targets(
    node: ast.stmt | ast.expr, source: str, *, is_package: bool, modules: dict[str, Path]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = source.split(".")
            above = above[: len(above) - node.level + is_package]
            base = ".".join([*above, *filter(None, [base])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in modules else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def is_within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + ".")


def part_of(name: str) -> str | None:
    """The first folder or module below the package in a dotted name; None for the package."""
    head, _, rest = name.partition(".")
    assert head == PACKAGE, f"{name} must lie in {PACKAGE}"
    return rest.split(".")[0] or None


def upward(imports: list[Import]) -> list[str]:
    wrong = []
    for entry in imports:
        source = part_of(entry.source)
        if source is None or not is_within(entry.target, PACKAGE):
            continue
        target = part_of(entry.target)
        if target is not None and target not in below(source):
            wrong.append(str(entry))
    return wrong


def misplaced(imports: list[Import]) -> list[str]:
    return [
        str(entry)
        for entry in imports
        for module, folders in ONLY_IN.items()
        if is_within(entry.target, module)
        and not any(is_within(entry.source, folder) for folder in folders)
    ]


def heavy(imports: list[Import]) -> list[str]:
    """Imports besides yaml that the ground floor and the control tower make of third parties."""
    light = sys.stdlib_module_names | {"yaml", PACKAGE}
    return [
        str(entry)
        for entry in imports
        if entry.at_import
        and part_of(entry.source) in {*GROUND, *CONTROL, None}
        and entry.target.split(".")[0] not in light
    ]


def cycle(imports: list[Import]) -> list[str]:
    """The modules of one import cycle, or nothing; lazy imports and those of types count."""
    return _cycle_of((entry.source, entry.target) for entry in imports if _is_inner(entry))


def circles(imports: list[Import]) -> dict[str, list[str]]:
    """Folder -> those of its children that import each other in a circle.

    A child is a module or a subfolder with all it holds. Lazy imports count.
    """
    edges: dict[str, set[tuple[str, str]]] = {}
    for entry in filter(_is_inner, imports):
        source, target = entry.source.split("."), entry.target.split(".")
        pairs = zip(source, target, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is not None:  # otherwise one is the __init__ of a folder that holds the other
            folder = ".".join(source[:shared])
            edges.setdefault(folder, set()).add((source[shared], target[shared]))
    found = {folder: _cycle_of(sorted(pairs)) for folder, pairs in edges.items()}
    return {folder: children for folder, children in found.items() if children}


def _is_inner(entry: Import) -> bool:
    return is_within(entry.target, PACKAGE) and entry.target != entry.source


def _cycle_of(edges: Iterable[tuple[str, str]]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def imports(repo: Path) -> list[Import]:
    return imports_of(repo)


def test_imports_go_down(imports: list[Import]) -> None:
    assert upward(imports) == []


def test_megatron_and_deepspeed_are_imported_in_their_folders_alone(imports: list[Import]) -> None:
    assert misplaced(imports) == []


def test_each_rule_is_about_a_module_that_exists(repo: Path) -> None:
    own = {name for name in ONLY_IN if is_within(name, PACKAGE)}
    assert own <= modules_of(repo).keys()


def test_ground_and_control_tower_need_no_third_party_but_yaml(imports: list[Import]) -> None:
    assert heavy(imports) == []


def test_no_import_cycle(imports: list[Import]) -> None:
    assert cycle(imports) == []


def test_no_two_folders_or_modules_of_a_folder_import_each_other(imports: list[Import]) -> None:
    assert circles(imports) == {}


def test_every_part_has_a_floor(repo: Path) -> None:
    for name in modules_of(repo):
        if part := part_of(name):
            assert part in below(part)


def _tree(root: Path, files: dict[str, str]) -> list[Import]:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return imports_of(root)


@pytest.mark.parametrize(
    ("file", "text", "target"),
    [
        ("config/job.py", f"import {PACKAGE}.training.loop", "training.loop"),
        ("ops/segments.py", f"from {PACKAGE}.layers import linear", "layers.linear"),
        ("ops/segments.py", "from ..layers import linear", "layers.linear"),
        (
            "ops/segments.py",
            f"def f():\n    from {PACKAGE}.layers.linear import x",
            "layers.linear",
        ),
        ("ops/segments.py", f"import importlib\nimportlib.import_module('{PACKAGE}.cli')", "cli"),
        ("sim/engine.py", f"from {PACKAGE}.ops import segments", "ops.segments"),
        ("ops/segments.py", f"from {PACKAGE}.sim import engine", "sim"),
        ("planner/search.py", f"from {PACKAGE}.scheduler.policy import Policy", "scheduler.policy"),
        ("runtime/ranks.py", f"from {PACKAGE}.cli.main import main", "cli.main"),
    ],
)
def test_imports_up_or_sideways_are_found(
    tmp_path: Path, file: str, text: str, target: str
) -> None:
    module = f"{PACKAGE}." + file.removesuffix(".py").replace("/", ".")
    files = {"layers/linear.py": "x = 1", "ops/segments.py": "", file: text}
    found = upward(_tree(tmp_path, files))
    assert len(found) == 1
    assert found[0].startswith(f"{module}:")
    assert found[0].endswith(f"imports {PACKAGE}.{target}")


def test_imports_down_are_allowed(tmp_path: Path) -> None:
    files = {
        "ops/segments.py": f"from {PACKAGE}.config.job import JobSpec",
        "training/loop.py": f"from {PACKAGE}.ops import segments\nfrom ..layers.linear import x",
        "layers/linear.py": "from . import attach\nx = 1",
        "layers/multi_adapter.py": "",
        "config/job.py": "import yaml",
        "cli/main.py": f"import {PACKAGE}\nfrom {PACKAGE}.runtime import launcher",
        "runtime/ranks.py": f"from {PACKAGE}.sim import engine",
        "sim/engine.py": "",
    }
    found = _tree(tmp_path, files)
    assert len(found) == 8
    assert (upward(found), misplaced(found), heavy(found), cycle(found)) == ([], [], [], [])
    assert circles(found) == {}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("training/loop.py", "import megatron.core"),
        ("training/loop.py", "def f():\n    from megatron.core import parallel_state"),
        ("integrations/deepspeed/engine.py", "import megatron.core"),
        ("integrations/megatron/build.py", "import deepspeed"),
        ("runtime/worker.py", f"from {PACKAGE}.integrations.megatron import cpu"),
    ],
)
def test_a_misplaced_import_is_found(tmp_path: Path, file: str, text: str) -> None:
    files = {"integrations/megatron/cpu.py": "import megatron.core", file: text}
    assert len(misplaced(_tree(tmp_path, files))) == 1


@pytest.mark.parametrize("file", ["config/job.py", "planner/search.py", "sim/engine.py"])
def test_torch_in_a_light_part_is_found_unless_lazy(tmp_path: Path, file: str) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    assert heavy(_tree(tmp_path, {file: lazy + "def f():\n    import torch\n"})) == []
    assert (
        len(heavy(_tree(tmp_path, {file: "try:\n    import torch\nexcept ImportError: ..."}))) == 1
    )


def test_a_circle_of_children_is_found_though_no_module_is_in_a_cycle(tmp_path: Path) -> None:
    empty = ("ops/x/b", "ops/y/c", "layers/x/b", "training/x/u/b", "training/x/v/c")
    files = {
        # folders
        "ops/x/a.py": "from ..y import c",
        "ops/y/d.py": "from ..x import b",
        # a folder and a module
        "layers/x/a.py": "from .. import e",
        "layers/e.py": "def f():\n    from .x import b",
        # folders of a folder
        "training/x/u/a.py": "from ..v import c",
        "training/x/v/d.py": "from ..u import b",
    }
    found = _tree(tmp_path, {f"{name}.py": "" for name in empty} | files)
    assert cycle(found) == []
    assert {folder.partition(".")[2]: set(names) for folder, names in circles(found).items()} == {
        "ops": {"x", "y"},
        "layers": {"x", "e"},
        "training.x": {"u", "v"},
    }


@pytest.mark.parametrize(
    "how",
    ["", "def f():\n    ", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "],
    ids=["at once", "lazily", "for types"],
)
def test_a_cycle_is_found(tmp_path: Path, how: str) -> None:
    files = {"ops/a.py": "from . import b", "ops/b.py": how + f"from {PACKAGE}.ops import a"}
    found = cycle(_tree(tmp_path, {**files, "ops/c.py": "import os"}))
    assert set(found) == {f"{PACKAGE}.ops.a", f"{PACKAGE}.ops.b"}


def test_a_folder_s_own_init_is_in_no_circle(tmp_path: Path) -> None:
    files = {"ops/x/a.py": "from .. import x", "ops/x/b.py": "from . import a"}
    assert circles(_tree(tmp_path, files)) == {}


def test_a_part_without_a_floor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tlora_megatron\.helpers must be given a floor"):
        below("helpers")


def test_command_line_and_config_import_without_torch() -> None:
    heavy = ("torch", "megatron", "transformers", "numpy", "sqlalchemy", "ray")
    code = (
        f"import {PACKAGE}.config, {PACKAGE}.cli.main as command_line; command_line.build_parser()"
    )
    assert not imported(code, *heavy)
