"""Sweeps with Ray Tune: their files, their trials and what they find."""
