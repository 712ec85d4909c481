"""Environments of other libraries as text environments."""
