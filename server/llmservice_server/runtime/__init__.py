"""The model on a device: start-up, memory, steps, embeddings."""
