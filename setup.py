"""Thin: all but the files that lie outside the package stands in pyproject.toml.

The package is pure Python at install. CUDA kernels under csrc/ are compiled on first use, where
there is nvcc, so that installing needs neither a compiler nor CUDA.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = {
    "configs/hardware/*.json": "planner/profiles",
    "configs/chat_templates/*": "config/chat_templates",
    "csrc/*": "csrc",
}
"""Files outside the package, and the folder of the installed package that gets a copy."""


class BuildWithData(build_py):
    """Copies profiles, chat templates and CUDA sources into the package that is installed."""

    def run(self) -> None:
        """Builds the package, and copies the data unless it is installed in place."""
        super().run()
        if self.editable_mode:
            return
        for pattern, packaged in DATA.items():
            folder = Path(self.build_lib) / "tlora_megatron" / packaged
            self.mkpath(str(folder))
            for path in sorted(Path().glob(pattern)):
                self.copy_file(str(path), str(folder / path.name))


setup(cmdclass={"build_py": BuildWithData})
