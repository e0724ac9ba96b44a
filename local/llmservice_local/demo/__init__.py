"""`llmservice demo`: manifest, tokens, scale-up and scale-down on this machine."""
