"""How commands reach a service: through its folder, or over HTTP."""
