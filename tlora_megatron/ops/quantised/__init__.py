"""A frozen base in FP8: codes, the quantiser of rows, and products with quantised weights."""
