"""`llmservice explain`: reads, judges and prints the state of a service."""
