"""What pods are and say: ready, starting, in trouble; the model that they hold."""
