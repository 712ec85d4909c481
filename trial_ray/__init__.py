"""TRIAL: trajectory-relative hindsight distillation for agentic RL, on RLlib's new API stack."""

__version__ = "0.1.0"
