"""What every layer shares: messages, errors, lanes. Imports nothing else of this package."""
