"""The kinds that the emulated API serves: schemas, defaults, validation, and how writes to them merge."""
