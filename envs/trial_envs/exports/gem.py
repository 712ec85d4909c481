"""Text environments in GEM's registry: ``gem.make("trial/ALFWorld-v0", …)``.

Importing this module registers every environment of this package under its Gymnasium id.
"""

from __future__ import annotations

import copy
import random
from typing import Any

from trial_envs import ENTRY_POINTS, NAMESPACE
from trial_envs.chat import SYSTEM_PROMPT, make_chat_env, user_message, with_task
from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError

try:
    import gem
    from gem.envs.registration import ENV_REGISTRY
except ImportError as error:
    raise MissingPackageError(f"GEM is not installed: {install_command('gem')}") from error


class TextGame(gem.Env):
    """A text environment with GEM's interface: ``step`` takes a model's whole response, with the action in tags.

    The first observation starts with the response format, because GEM's prompts have no other place for it.

    Args:
        text_env: id of a text environment, set by the registration at the end of this module.
        seed: seeds the choice of the tasks, unless the first call of ``reset`` gets another seed.
        settings: keyword arguments of the environment.
    """

    def __init__(self, text_env: str, seed: int | None = None, **settings: Any) -> None:
        super().__init__()
        self._made_with = (text_env, settings)
        self._seed = seed
        self._env = make_chat_env(text_env, **settings)
        self._offered: list[str] = []

    def reset(self, seed: int | None = None, task: str | int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the choice of the task in this and later episodes, and Python's and NumPy's global generators.
            task: task id or index; ``None`` draws one.
        """
        super().reset(seed)
        first, self._seed = self._seed if seed is None else seed, None
        observation, info = self._env.reset(seed=first, options={"task": task})
        self._offered = info["admissible_actions"]
        return f"{SYSTEM_PROMPT}\n\n{user_message(with_task(observation, info), info)}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out the action in a response."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._offered = info["admissible_actions"]
        return user_message(observation, info), float(reward), terminated, truncated, info

    def sample_random_action(self) -> str:
        """Return a response with a random admissible action, drawn by Python's global generator (seeded by ``reset``)."""
        if not self._offered:
            raise ValueError(
                "No actions are listed to draw from: call reset(), or choose an environment that lists actions."
            )
        return f"<think></think><action>{random.choice(self._offered)}</action>"

    def spawn(self, same_state: bool = False, **settings: Any) -> TextGame:
        """Make another environment.

        Args:
            same_state: whether the new environment continues this episode, by replaying its actions.
            settings: keyword arguments to change; not allowed with ``same_state``.

        Raises:
            ValueError: ``same_state`` is set together with settings.
        """
        if not same_state:
            text_env, made_with = self._made_with
            return TextGame(text_env, **made_with | settings)
        if settings:
            raise ValueError(f"Expected the settings of the state, got {sorted(settings)}.")
        return copy.deepcopy(self)

    def close(self) -> None:
        """Free the environment; repeated calls have no effect."""
        self._env.close()


for _name in ENTRY_POINTS:
    if f"{NAMESPACE}/{_name}" not in ENV_REGISTRY:
        gem.register(f"{NAMESPACE}/{_name}", "trial_envs.exports.gem:TextGame", text_env=f"{NAMESPACE}/{_name}")
