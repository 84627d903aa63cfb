"""Tenants of a service: their tokens, their files and how much they may have."""
