"""The trained causal LM as an RLModule, its log-probabilities, and the models that ship with the package."""
