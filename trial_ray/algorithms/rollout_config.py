"""Configuration of what samples: rollouts, engines, the panel, the recording."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import NotProvided

from trial_ray.algorithms.checked_config import CheckedConfig
from trial_ray.environments.templates import GENERIC, check_template
from trial_ray.errors import ConfigError
from trial_ray.inference.admission import MIN_TEMPERATURE
from trial_ray.inference.engine_arguments import engine_dtype
from trial_ray.inference.pool import ENGINES

if TYPE_CHECKING:
    from typing import Self

    from trial_ray.environments.templates import PromptTemplate


class RolloutConfig(CheckedConfig):
    """How episodes are played, by which engines, and on which panel; ``GRPOConfig`` adds what is trained."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)

        # .rollouts()
        self.max_prompt_tokens = 2048
        self.max_response_tokens = 512
        self.temperature = 1.0
        self.top_p = 1.0
        self.history_window = 2
        self.prompt_style = "tagged"
        self.prompt_template: PromptTemplate | None = None
        self.seeded_sampling = False
        self.max_episodes_in_flight = 64
        self.request_timeout_s = 600.0
        self.max_group_redraws = 2

        # .engines()
        self.engine = "vllm"
        self.num_engines = 1
        self.engine_kwargs: dict[str, Any] = {}
        self.num_cpus_per_engine = 1.0
        self.num_gpus_per_engine = 0.0
        self.engine_start_timeout_s = 600.0

        # .panel()
        self.panel_env_config: dict[str, Any] = {}
        self.panel_split: str | None = None
        self.panel_num_tasks = 128
        self.panel_seed = 0
        self.panel_temperature = 0.4
        self.panel_top_p = 1.0

        # .recording()
        self.trajectories_folder: str | None = None

    def rollouts(
        self,
        *,
        max_prompt_tokens: int = NotProvided,
        max_response_tokens: int = NotProvided,
        temperature: float = NotProvided,
        top_p: float = NotProvided,
        history_window: int = NotProvided,
        prompt_style: str = NotProvided,
        prompt_template: PromptTemplate | None = NotProvided,
        seeded_sampling: bool = NotProvided,
        max_episodes_in_flight: int = NotProvided,
        request_timeout_s: float = NotProvided,
        max_group_redraws: int = NotProvided,
    ) -> Self:
        """Set how episodes are played.

        Args:
            max_prompt_tokens: limit of the ordinary prompt.
            max_response_tokens: limit of a response, stop token included.
            temperature: of training rollouts, above 0. The policy that is trained is the tempered one: logits are divided
                by it wherever the learner computes log-probabilities, too.
            top_p: nucleus mass of training rollouts; 1, because no correction for another is implemented.
            history_window: observation/action pairs shown in a prompt.
            prompt_style: ``"tagged"`` (reason in ``<think>``, act in ``<action>``) or ``"plain"`` (the response is the action).
            prompt_template: object that writes the prompts and reads the responses, see ``trial_ray.environments.templates``; its
                style must be ``prompt_style``. ``None``: that of the environment, else a generic one.
            seeded_sampling: give every request a seed of its own, so that a run can be repeated.
            max_episodes_in_flight: episodes that one env runner plays at once.
            request_timeout_s: deadline of one response.
            max_group_redraws: times that a task is drawn again when fewer than 2 of its rollouts survived.
        """
        return self._assign(
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            temperature=temperature,
            top_p=top_p,
            history_window=history_window,
            prompt_style=prompt_style,
            prompt_template=prompt_template,
            seeded_sampling=seeded_sampling,
            max_episodes_in_flight=max_episodes_in_flight,
            request_timeout_s=request_timeout_s,
            max_group_redraws=max_group_redraws,
        )

    def engines(
        self,
        *,
        engine: str = NotProvided,
        num_engines: int = NotProvided,
        engine_kwargs: dict[str, Any] = NotProvided,
        num_cpus_per_engine: float = NotProvided,
        num_gpus_per_engine: float = NotProvided,
        engine_start_timeout_s: float = NotProvided,
    ) -> Self:
        """Choose the inference engines.

        Args:
            engine: ``"vllm"`` or ``"transformers"``.
            num_engines: engine actors in the pool.
            engine_kwargs: passed to the engine's constructor (``dtype``, ``tensor_parallel_size``, ...); with vLLM also
                fields of its ``EngineArgs``. Without ``dtype``, engines compute in bfloat16 where each has a GPU, else in
                float32.
            num_cpus_per_engine: CPUs that Ray reserves for each.
            num_gpus_per_engine: GPUs that Ray reserves for each.
            engine_start_timeout_s: deadline of the start of the whole pool.
        """
        return self._assign(
            engine=engine,
            num_engines=num_engines,
            engine_kwargs=engine_kwargs,
            num_cpus_per_engine=num_cpus_per_engine,
            num_gpus_per_engine=num_gpus_per_engine,
            engine_start_timeout_s=engine_start_timeout_s,
        )

    def panel(
        self,
        *,
        env_config: dict[str, Any] = NotProvided,
        split: str | None = NotProvided,
        num_tasks: int = NotProvided,
        seed: int = NotProvided,
        temperature: float = NotProvided,
        top_p: float = NotProvided,
    ) -> Self:
        """Choose the fixed panel of held-out tasks that evaluation plays, one rollout each.

        Args:
            env_config: entries that replace those of the training environment's ``env_config``.
            split: split that the tasks come from; ``None`` means no panel.
            num_tasks: tasks in the panel.
            seed: chooses which tasks, and seeds the rollouts.
            temperature: sampling temperature of the evaluation.
            top_p: nucleus mass of the evaluation.
        """
        return self._assign(
            panel_env_config=env_config,
            panel_split=split,
            panel_num_tasks=num_tasks,
            panel_seed=seed,
            panel_temperature=temperature,
            panel_top_p=top_p,
        )

    def recording(self, *, trajectories_folder: str | None = NotProvided) -> Self:
        """Write every training trajectory as Parquet below ``trajectories_folder``; ``None`` writes nothing."""
        return self._assign(trajectories_folder=trajectories_folder)

    # -- checks ----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every value; errors as ``GRPOConfig.validate``."""
        super().validate()
        self._require_at_least(
            1, "num_engines", "max_prompt_tokens", "max_response_tokens", "max_episodes_in_flight", "panel_num_tasks"
        )
        self._require_at_least(0, "panel_temperature", "history_window", "max_group_redraws")
        self._require_one_of("engine", ENGINES)
        self.engine_dtype()
        self._validate_sampling()
        self._validate_template()

    def _validate_sampling(self) -> None:
        """Training needs the log-probabilities of the distribution that was sampled from."""
        if not (self.temperature >= MIN_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature is {self.temperature}, expected a finite value of at least {MIN_TEMPERATURE}: greedy responses have "
                "no distribution to take a gradient of. For greedy evaluation set .panel(temperature=0)."
            )
        if self.top_p != 1:
            raise ConfigError(
                f"top_p is {self.top_p}, expected 1: responses from a nucleus have other log-probabilities than those that are "
                "trained, and no correction for it is implemented. For evaluation set .panel(top_p=...)."
            )
        if self.panel_temperature and not self.panel_temperature >= MIN_TEMPERATURE:
            raise ConfigError(
                f"panel_temperature is {self.panel_temperature}, expected 0 (greedy) or at least {MIN_TEMPERATURE}."
            )
        if not 0 < self.panel_top_p <= 1:
            raise ConfigError(f"panel_top_p is {self.panel_top_p}, expected a value in (0, 1].")

    def engine_dtype(self) -> str:
        """Torch name of the type in which engines hold the weights, and the learner sends them.

        Raises:
            ConfigError: ``engine_kwargs`` names one in which no engine computes.
        """
        return engine_dtype(self.engine_kwargs.get("dtype"), on_gpu=self.num_gpus_per_engine > 0)

    def _validate_template(self) -> None:
        self._require_one_of("prompt_style", tuple(GENERIC))
        if self.prompt_template is None:
            return
        check_template(self.prompt_template, self.prompt_style)
        if self.warm_start is not None:
            raise ConfigError(
                "A warm start clones responses to the prompts of the environment's own template, so prompt_template cannot be "
                "set with warm_start; leave one of them out."
            )
