"""Adapters on Transformer Engine's linears: products without autograd, and their FP8."""
