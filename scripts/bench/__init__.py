"""Regression benchmarks; README.md beside this file says what each measures and how to run it."""
