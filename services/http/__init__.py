"""The OpenAI-compatible HTTP API, in the scheduler process and over the same gateway as gRPC."""
