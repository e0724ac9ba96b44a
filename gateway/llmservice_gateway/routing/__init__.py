"""Which pods serve a model, and which of them takes a request."""
