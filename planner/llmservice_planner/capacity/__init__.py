"""How many replicas of which GPU given traffic needs, and the manifest of that."""
