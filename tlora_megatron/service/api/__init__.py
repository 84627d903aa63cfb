"""The service over HTTP: one process beside the controller, over its store and folder alone."""

try:
    import fastapi  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"a service over HTTP needs {error.name}: pip install 'tlora-megatron[serve]'"
    ) from error
