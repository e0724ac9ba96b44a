"""Between text and tokens: tokenizer, chat template, output processing, tool calls. Imports no torch."""
