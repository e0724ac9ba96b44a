"""The operator's process under kopf; the only package that imports it."""
