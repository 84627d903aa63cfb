"""Job mixes that come with the package."""
