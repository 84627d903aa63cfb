"""Cases of `scripts.bench.doors`, each a module."""
