"""What the pods of a service are doing, from Prometheus or from the pods themselves."""
