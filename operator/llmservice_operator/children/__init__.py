"""The objects that a service should own, as plain data. Pure."""
