"""The server's subcommands of `llmservice`."""
