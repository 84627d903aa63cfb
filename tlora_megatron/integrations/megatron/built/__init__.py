"""A model that someone else built: its parts, its linears, and who computes them."""
