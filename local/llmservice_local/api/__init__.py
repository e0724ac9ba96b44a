"""The emulated Kubernetes API."""
