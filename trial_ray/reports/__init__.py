"""What runs and checkpoints show: learning dynamics, allocation over turns, two policies on one game; data and plots."""
