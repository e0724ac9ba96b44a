"""The operator's process: kopf owns it, and no other package imports kopf. docs/decisions/kopf.md says what it does."""
