"""Between text and tokens: tokenizer, chat template, stop strings, tool calls."""
