"""What the text environments share."""

from trial_envs.core.text_env import AnyText, Outcome, TextEnv

__all__ = ["AnyText", "Outcome", "TextEnv"]
