"""Where a model lies, how it gets into a pod, and where its shape is learned before any pod runs."""
