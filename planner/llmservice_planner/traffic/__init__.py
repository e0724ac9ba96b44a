"""Recorded traffic: its formats, lengths and statistics."""
