"""Small random checkpoints of every family and quantised format."""
