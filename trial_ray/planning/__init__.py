"""Estimates of a run's memory and iteration time before anything starts, from shapes and constants."""
