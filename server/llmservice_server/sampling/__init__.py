"""From logits to tokens: parameters, grammars, probabilities."""
