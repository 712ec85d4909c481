"""Estimates of a run's memory and iteration time before it starts. In reading order:

- ``memory``: sizes of a run, read from its config, and the memory of its actors
- ``fit``: whether the actors fit a machine, and the smallest changes that make them fit
- ``time``: seconds of an iteration by phase, and a list of GPUs with their peak performance
"""
