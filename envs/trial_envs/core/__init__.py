"""Base class and spaces of the text environments, and tools that all packages of this library share.

In reading order:

- ``text_env``: the base class, its contract and its ``info``.
- ``text_space``: the space of texts.
- ``task_numbers``: task ids that are numbers.
- ``projection``: the action in a language model's response.
- ``levels``, ``extras``, ``cache``: checks of settings, optional dependencies, and the cache folder.
- ``forks``, ``fork_server``: resources after a fork, and processes that end with their owner.
"""

from trial_envs.core.text_env import Outcome, TextEnv
from trial_envs.core.text_space import MAX_TEXT, AnyText

__all__ = ["MAX_TEXT", "AnyText", "Outcome", "TextEnv"]
