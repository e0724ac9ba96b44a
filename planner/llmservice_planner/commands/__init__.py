"""`llmservice plan` and `llmservice traffic`."""
