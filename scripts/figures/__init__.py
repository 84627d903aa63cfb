"""Compares every figure of README.md and docs/benchmarks.md with the row it comes from."""
