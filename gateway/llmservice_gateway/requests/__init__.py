"""A request's way through the gateway: held while no pod is ready, forwarded, its response streamed back."""
