"""Bringing a checkpoint to a pod: from a hub, a bucket or a folder, resumable, checked, once for many pods."""
