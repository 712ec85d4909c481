"""Environments of other libraries, as Gymnasium text environments."""
