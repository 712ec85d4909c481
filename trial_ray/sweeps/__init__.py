"""Sweeps with Ray Tune: sweep files, trials and results."""
