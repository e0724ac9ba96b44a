"""The API's endpoints."""
