"""The service over HTTP: one process beside the controller, over its store and folder alone."""

try:
    import fastapi  # noqa: F401
except ImportError as error:
    raise ImportError(
        "a service over HTTP needs FastAPI: pip install 'tlora-megatron[serve]'"
    ) from error
