"""Metadata, declared imports, and the contents of sdist and wheel."""

from __future__ import annotations

import ast
import builtins
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement

import tlora_megatron
from scripts import missing_requirements as requirements
from tests.helpers.launch import HANG_S


@pytest.fixture(scope="module")
def pyproject(repo: Path) -> dict[str, Any]:
    return tomllib.loads((repo / "pyproject.toml").read_text())


def _imported(folder: Path) -> set[str]:
    """Top-level names of third parties that the Python files of a folder import, lazily or not."""
    names = set()
    for path in folder.rglob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
        # A script may import the script beside it.
        names |= {name for name in found if not (path.parent / f"{name}.py").is_file()}
    return names - set(sys.stdlib_module_names) - {"tlora_megatron", "tests", "scripts"}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("tlora_megatron", "train kernels attention deepspeed wandb serve tinker ray data"),
        ("scripts", "train kernels verify deepspeed docs bench openai tinker"),
        ("tests", "test deepspeed wandb"),
    ],
)
def test_every_import_is_declared(
    repo: Path, pyproject: dict[str, Any], folder: str, extras: str
) -> None:
    project = pyproject["project"]
    declared = {r.name.lower() for r in requirements.required(project, extras.split())}
    # packaging and tokenizers come with transformers, pip's vendored copy with pip.
    declared |= {"packaging", "tokenizers", "tqdm", "huggingface-hub", "pip"}
    # Scripts of tests/helpers that run in interpreters of their own (scripts/*.sh make them).
    declared |= {"tinker-cookbook", "chz", "trl", "datasets"} if folder == "tests" else set()
    declared |= {"starlette"} if "fastapi" in declared else set()
    declared |= {"flash-attn"} if "flash-attn-4" in declared else set()  # only on GPUs
    distributions = packages_distributions()
    undeclared = {
        name: sorted(set(distributions.get(name, [name])))
        for name in _imported(repo / folder)
        if not declared & {d.lower().replace("_", "-") for d in distributions.get(name, [name])}
    }
    assert undeclared == {}


def test_extras_may_name_extras(pyproject: dict[str, Any]) -> None:
    names = {r.name for r in requirements.required(pyproject["project"], ["dev"])}
    assert {"pre-commit", "pytest", "peft", "torch", "pyyaml"} <= names
    assert "tlora-megatron" not in names
    light = {r.name for r in requirements.required(pyproject["project"], [])}
    assert light == {"pyyaml", "rich"}


@pytest.mark.parametrize(
    ("text", "met"),
    [("pytest>=8", True), ("pytest<8", False), ("no-such-distribution", False), ("pytest", True)],
)
def test_requirements_are_compared_with_what_is_installed(text: str, met: bool) -> None:
    assert requirements.is_met(Requirement(text)) is met


@pytest.mark.parametrize("name", ["tlora-megatron", "pytest", "no-such-distribution"])
def test_an_install_from_another_folder_does_not_count(tmp_path: Path, name: str) -> None:
    assert not requirements.is_installed_from(tmp_path, name)


@pytest.fixture(scope="module")
def built(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and wheel, built from a copy of the files git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repo,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("needs a git checkout to know the project's files")
    source = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.stdout.split("\0")):
        if (repo / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repo / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    # The wheel is built from the sdist, so what the sdist forgets is missing there too.
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (out / "source").symlink_to(source)
    return out


def _files(root: Path, folder: str) -> set[str]:
    return {str(path.relative_to(root)) for path in (root / folder).rglob("*") if path.is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if name.startswith("tlora_megatron/")}
    # The planner's profiles: `--hardware h200` has to work where there is no checkout.
    profiles = {
        f"tlora_megatron/planner/profiles/{path.name}"
        for path in (built / "source" / "configs" / "hardware").glob("*.json")
    }
    assert "tlora_megatron/planner/profiles/h200.json" in profiles
    templates = {
        f"tlora_megatron/config/chat_templates/{name.rpartition('/')[2]}"
        for name in _files(built / "source", "configs/chat_templates")
    }
    assert "tlora_megatron/config/chat_templates/qwen3.jinja" in templates
    # The CUDA kernels' sources: they are compiled on first use.
    sources = {f"tlora_megatron/{name}" for name in _files(built / "source", "csrc")}
    assert "tlora_megatron/csrc/lora_gemm.cu" in sources
    assert package == _files(built / "source", "tlora_megatron") | profiles | sources | templates
    assert "tlora_megatron/py.typed" in package
    assert {name.split("/")[0] for name in names - package} == {
        f"tlora_megatron-{tlora_megatron.__version__}.dist-info"
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_says_what_it_is(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    info = f"tlora_megatron-{tlora_megatron.__version__}.dist-info"
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {tlora_megatron.__version__}\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert (
        "tlora = tlora_megatron.cli.__main__:run"
        in archive.read(f"{info}/entry_points.txt").decode()
    )


@pytest.mark.parametrize(
    "folder", ["tlora_megatron", "csrc", "deploy", "scripts", "configs", "tests"]
)
def test_the_sdist_holds_the_repository(built: Path, folder: str) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _files(built / "source", folder) <= names
    assert {"LICENSE", "setup.py", "pyproject.toml"} <= names


class Installed(NamedTuple):
    """An environment of its own that holds the project and borrows this one's third parties."""

    venv: Path

    @classmethod
    def make(cls, venv: Path, *install: object) -> Installed:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        made = cls(venv)
        # Folders named by a .pth file are searched, but their own .pth files are not read: nothing
        # leads to the checkout that is installed in this environment.
        borrowed = [path for path in sys.path if path.endswith("site-packages")]
        (made.site / "third_parties.pth").write_text("\n".join(borrowed))
        pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        done = made.run(*pip, *offline, *install)
        assert done.returncode == 0, done.stderr[-3000:]
        return made

    @property
    def site(self) -> Path:
        return next(self.venv.glob("lib/python*/site-packages"))

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Runs a command outside any checkout."""
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.venv,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    def tlora(self, *words: object) -> str:
        done = self.run(self.venv / "bin" / "tlora", *words)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def places(self) -> list[Path]:
        """Where it finds the package, the CUDA sources and the hardware profiles."""
        code = (
            "import tlora_megatron\n"
            "from tlora_megatron.ops.kernel_build import SOURCES\n"
            "from tlora_megatron.planner.hardware import shipped_profiles\n"
            "print(tlora_megatron.__file__, SOURCES, shipped_profiles(), sep='\\n')"
        )
        done = self.run(self.venv / "bin" / "python", "-c", code)
        assert done.returncode == 0, done.stderr[-3000:]
        return [Path(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    (wheel,) = built.glob("*.whl")
    return Installed.make(tmp_path_factory.mktemp("wheel") / "venv", wheel)


@pytest.mark.slow
def test_the_wheel_finds_its_files_and_no_other_wheel_s(installed: Installed) -> None:
    (installed.site / "csrc").mkdir(exist_ok=True)
    (installed.site / "csrc" / "other.cu").touch()
    package = installed.site / "tlora_megatron"
    module, sources, profiles = installed.places()
    assert module == package / "__init__.py"
    assert sources == package / "csrc"
    assert profiles == package / "planner" / "profiles"


@pytest.mark.slow
def test_the_wheel_plans_and_inspects(installed: Installed, repo: Path, tmp_path: Path) -> None:
    assert "usage: tlora" in installed.tlora("--help")
    (tmp_path / "unread.jsonl").write_text("not read")
    job = {"name": "a", "data": {"train": "unread.jsonl"}, "max_steps": 1}
    config = {
        "base_model": {
            "config": str(repo / "configs/models/llama-3.1-8b.json"),
            "random_init": True,
        },
        "run": {"output_dir": "out"},
        "jobs": [job],
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    shown = installed.tlora("plan", path, "--gpus", 8, "--hardware", "h200", "--lengths", "256:1")
    assert "tokens/s" in shown
    assert "CUDA compiler" in installed.tlora("inspect", "kernels")


@pytest.mark.parametrize(
    ("extra", "pinned"),
    [
        # Later ones of megatron-core import triton, which this torch does not bring.
        ("train", "torch==2.13.0 megatron-core==0.16.1"),
        ("test", "torch==2.13.0 megatron-core==0.16.1 triton==3.6.0"),
    ],
)
def test_setup_env_names_what_is_missing_and_refuses(
    repo: Path, tmp_path: Path, extra: str, pinned: str
) -> None:
    """An environment without packages and without a network: the error lists the packages."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    # missing_requirements.py needs packaging, which pip would have brought.
    packaging = Path(Requirement.__init__.__globals__["__file__"]).parent
    shutil.copytree(packaging, site / "packaging")
    result = subprocess.run(
        [repo / "scripts" / "setup_env.sh", extra],
        env={"PATH": os.environ["PATH"], "TLORA_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 1
    assert "these packages are missing" in result.stderr
    for name in ("torch", "megatron-core", "rich", "tlora-megatron"):
        assert name in result.stderr.splitlines()[-1]
    assert result.stdout == ""
    if shutil.which("nvidia-smi") is None:
        assert f"installing {pinned}\n" in result.stderr


@pytest.mark.parametrize("missing", ["triton", "something_else"])
def test_megatron_that_needs_triton_says_so(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    from tlora_megatron.runtime import backbone

    real = builtins.__import__

    def import_without(name: str, *args: Any) -> ModuleType:
        if name.startswith("tlora_megatron.integrations.megatron"):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", import_without)
    remedy = r"needs triton, .*; pip install triton or pip install 'megatron-core<0.18'"
    expected = remedy if missing == "triton" else "No module named 'something_else'"
    with pytest.raises(ImportError, match=expected):
        backbone.import_backbone()
