"""Kernels of frozen parts that also leave FP8 codes of what they write, for the linear that reads
it: its rows are not read again to be quantised."""
