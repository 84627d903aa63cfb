"""Scripts of the repository; `python -m scripts.bench.NAME` runs a benchmark from its root."""
