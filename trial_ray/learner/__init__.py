"""The learner: connectors, packing, losses, checkpoints, weight export."""
