"""The learner: scoring, packing, losses, checkpoints, weight export."""
