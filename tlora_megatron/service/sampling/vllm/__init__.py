"""Samples by vLLM's own server, over its HTTP."""
