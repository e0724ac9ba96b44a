"""The LLMService API: spec and status, the CRD, labels, and the kinds around it."""
