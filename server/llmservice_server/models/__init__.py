"""The model families that the server runs."""
