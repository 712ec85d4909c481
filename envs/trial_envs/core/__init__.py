"""Base class and spaces of the text environments, and helpers that all packages of ``trial_envs`` share.

In reading order:

- ``text_env``: the base class of the environments, and the keys of ``info``.
- ``text_space``: the space of texts.
- ``task_numbers``: task ids that are numbers.
- ``projection``: reads the action from a language model's response.
- ``levels``: checks of settings.
- ``extras``: the commands that install optional dependencies.
- ``cache``: the cache folder.
- ``forks``: locks and temporary folders that are safe to use after a fork.
- ``fork_server``: processes that end when the process that requested them ends.
"""

from trial_envs.core.text_env import Outcome, TextEnv
from trial_envs.core.text_space import MAX_TEXT, AnyText

__all__ = ["MAX_TEXT", "AnyText", "Outcome", "TextEnv"]
