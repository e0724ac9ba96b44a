"""How many replicas, and why. Pure, with time passed in."""
