"""What is known of a model from its files: shape, weights, formats, families."""
