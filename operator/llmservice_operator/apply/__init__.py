"""Making live children what they should be, and writing nothing where nothing differs."""
