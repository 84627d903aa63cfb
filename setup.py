"""Thin: all but the hardware profiles stands in pyproject.toml.

The package is pure Python at install. CUDA kernels under csrc/ are compiled on first use, where
there is nvcc, so that installing needs neither a compiler nor CUDA.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProfiles(build_py):
    """Installs configs/hardware, which lies outside the package: the planner finds it by name."""

    def run(self) -> None:
        """Builds the package, and copies the profiles unless it is installed in place."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "tlora_megatron" / "planner" / "profiles"
        self.mkpath(str(folder))
        for profile in sorted(Path("configs/hardware").glob("*.json")):
            self.copy_file(str(profile), str(folder / profile.name))


setup(cmdclass={"build_py": BuildWithProfiles})
