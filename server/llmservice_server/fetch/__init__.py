"""Downloads or copies a checkpoint into a folder, from the Hugging Face hub, S3 or a local path."""
