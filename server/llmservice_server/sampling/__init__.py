"""From logits to tokens: parameters, grammars, log-probabilities."""
