"""Text from the bases of a service with the caller's adapters, as OpenAI's clients ask for it."""
