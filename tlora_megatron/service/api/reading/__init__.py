"""`/docs`: what the service understands, from its OpenAPI description, without foreign scripts."""
