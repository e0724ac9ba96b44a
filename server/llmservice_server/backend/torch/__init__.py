"""Plain torch on any device: the reference of the other backends."""
