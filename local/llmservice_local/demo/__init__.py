"""`llmservice demo`: the whole path, shown."""
