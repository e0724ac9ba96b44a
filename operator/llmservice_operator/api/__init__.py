"""What users and the API server see: the spec and status of an LLMService, its CRD, its labels, the kinds around it."""
