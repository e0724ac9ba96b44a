"""The load of a service, from Prometheus or from its pods."""
