"""Profiles of a model's steps, compared with the roofline of this machine."""
