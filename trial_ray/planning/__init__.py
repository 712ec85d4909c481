"""Estimates of a run's memory and iteration time before it starts, from model shapes and constants."""
