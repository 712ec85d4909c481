"""The trained causal LM as an RLModule, its log-probabilities, and the models shipped with the package."""
