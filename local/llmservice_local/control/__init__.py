"""The cluster's controllers and its scheduler, clients of any Kubernetes API."""
