"""Where models come from, on the loopback: a hub, an object store, credentials, and their faults."""
