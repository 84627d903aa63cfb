"""Bases in FP8 on the disk: published folders, and the hash of codes in checkpoints."""
