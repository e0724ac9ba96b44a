"""The API server: its client, the cache of what it holds, and the lists that keep the cache true."""
