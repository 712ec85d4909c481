"""Reports of runs and checkpoints: learning dynamics, allocation over turns, two policies on one game."""
