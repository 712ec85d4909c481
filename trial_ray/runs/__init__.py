"""A training run: session, run folder, checkpoints, metrics, overrides, progress."""
