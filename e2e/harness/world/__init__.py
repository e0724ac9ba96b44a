"""The operator against an API server that can fail, with time that a test gives."""
