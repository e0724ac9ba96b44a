"""What a client may do: keys, limits, and the proof of it for the pods."""
