"""Reports of runs and checkpoints: learning dynamics, allocation over turns, and two policies on the same game."""
