"""How commands reach a gang and events leave it: append-only files."""
