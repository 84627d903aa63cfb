"""Replays traces under every scheduling policy."""
