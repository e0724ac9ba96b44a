"""The node: pods as local processes."""
