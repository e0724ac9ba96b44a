"""Between text and tokens: tokenizer, chat template, output processing, tool calls, reasoning. Imports no torch."""
