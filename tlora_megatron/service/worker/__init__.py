"""The processes of a gang: the only part of the service that imports torch."""
