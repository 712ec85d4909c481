"""Text environments in SkyRL-gym's registry, as conversations: ``skyrl_gym.make("trial/ALFWorld-v0", …)``.

Importing this module registers every environment of this package under its Gymnasium id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trial_envs import ENTRY_POINTS, NAMESPACE
from trial_envs.chat import SYSTEM_PROMPT, episode_metrics, make_chat_env, user_message, with_task
from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError

try:
    import skyrl_gym
    from omegaconf import OmegaConf
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
except ImportError as error:
    raise MissingPackageError(f"SkyRL-gym is not installed: {install_command('skyrl-gym')}") from error


class TextConversation(BaseTextEnv):
    """A text environment for SkyRL's generator: user messages are observations, and a response contains its action in tags.

    Args:
        env_id: id of a text environment; set by :func:`register`.
        env_config: keyword arguments of the environment (SkyRL's ``environment.skyrl_gym.<env class>``).
        extras: columns of the dataset's row. ``task`` selects the task (id or index); without it, a task is drawn.
            ``max_turns``, which SkyRL's generator sets from its configuration, truncates the episode unless ``env_config`` or
            ``settings`` sets it.
        settings: keyword arguments of the environment, set by :func:`register`; ``env_config`` overrides them.
    """

    def __init__(
        self,
        env_id: str,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        extras = extras or {}
        overrides = OmegaConf.to_container(OmegaConf.create(env_config or {}), resolve=True)
        limit = {"max_turns": int(extras["max_turns"])} if "max_turns" in extras else {}
        self._env = make_chat_env(env_id, **limit | settings | overrides)
        self._task = extras.get("task")
        self._total, self._invalid = 0.0, 0
        self.max_turns = self._env.unwrapped.max_turns  # type: ignore[attr-defined]

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Start the episode.

        Args:
            prompt: the dataset's messages, such as a system message; if empty, :data:`trial_envs.chat.SYSTEM_PROMPT`.

        Returns:
            The prompt followed by the task and the first observation as a user message, and ``info``.
        """
        observation, self._info = self._env.reset(options={"task": self._task})
        self.turns, self._total, self._invalid = 0, 0.0, 0
        opening = list(prompt) or [{"role": "system", "content": SYSTEM_PROMPT}]
        first = {"role": "user", "content": user_message(with_task(observation, self._info), self._info)}
        return [*opening, first], self._info

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Carry out the action in a response. The last observation of an episode is only in ``metadata``."""
        observation, reward, terminated, truncated, self._info = self._env.step(action)
        done = terminated or truncated
        self.turns += 1
        self._total += float(reward)
        self._invalid += self._info["invalid_response"]
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": user_message(observation, self._info)}],
            reward=float(reward),
            done=done,
            metadata=self._info | {"observation": observation},
        )

    def get_metrics(self) -> dict[str, float]:
        """Return the metrics of the episode; see :func:`trial_envs.chat.episode_metrics`."""
        return episode_metrics(self._total, self.turns, self._invalid, self._info)

    def close(self) -> None:
        """Free the environment; repeated calls have no effect."""
        self._env.close()


def register(name: str, env_id: str, **settings: Any) -> None:
    """Register a text environment with fixed settings.

    Call this function in the Ray task in which SkyRL's entry script registers its environments.

    Args:
        name: id in SkyRL-gym's registry, used as the dataset's ``env_class``. A repeated call replaces the settings.
        env_id: id of a text environment, such as ``trial/ALFWorld-v0``.
        settings: keyword arguments of the environment.
    """
    skyrl_gym.registry.pop(name, None)
    skyrl_gym.register(id=name, entry_point=TextConversation, kwargs={"env_id": env_id, **settings})


for _name in ENTRY_POINTS:
    register(f"{NAMESPACE}/{_name}", f"{NAMESPACE}/{_name}")
