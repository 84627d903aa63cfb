"""Thin: everything stands in pyproject.toml.

The package is pure Python at install. CUDA kernels under csrc/ are compiled on first use, where
there is nvcc, so that installing needs neither a compiler nor CUDA.
"""

from setuptools import setup

setup()
