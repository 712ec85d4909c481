"""What the trainer knows of environments: one adapter each."""
