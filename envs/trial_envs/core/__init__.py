"""Base class and spaces of the text environments."""

from trial_envs.core.text_env import Outcome, TextEnv
from trial_envs.core.text_space import MAX_TEXT, AnyText

__all__ = ["MAX_TEXT", "AnyText", "Outcome", "TextEnv"]
