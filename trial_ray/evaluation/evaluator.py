"""A model on engines and env runners, without anything that learns: what plays full sets and panels."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from trial_ray.evaluation.panel_player import PanelPlayer
from trial_ray.evaluation.settings import EvaluationSettings
from trial_ray.inference.weights import pack_weights, weights_checksum
from trial_ray.models.causal_lm_module import load_causal_lm
from trial_ray.rollout.workers import RolloutWorkers, create_engines


class Evaluator(AbstractContextManager[PanelPlayer]):
    """Entering it starts Ray actors for one model and returns the :class:`PanelPlayer`; leaving it stops them.

    Engines start from the model's folder like those of a training run, and are then sent the weights of this process, so
    that both kinds of engine confirm by checksum what they play.

    Args:
        config: validated; its ``model_path`` is a model folder.

    Attributes:
        weights: checksum of the weights as engines hold them, known before anything starts.

    Raises:
        ConfigError: no model could be loaded.
    """

    def __init__(self, config: EvaluationSettings) -> None:
        self._config = config
        self._dtype = getattr(torch, config.engine_dtype())
        self._model: torch.nn.Module | None = load_causal_lm(str(config.model_path), config.model_dtype)
        tensors = ((name, tensor.to(self._dtype)) for name, tensor in self._model.named_parameters())
        self.weights = weights_checksum(tensors)
        self._stack = ExitStack()

    def __enter__(self) -> PanelPlayer:
        config = self._config
        with ExitStack() as starting:
            engines = create_engines(config)
            starting.callback(engines.stop)
            runners = EnvRunnerGroup(env_creator=None, config=config, local_env_runner=config.create_local_env_runner)
            starting.callback(runners.stop)
            engines.start(config.engine_start_timeout_s)
            assert self._model is not None, "entered twice"
            engines.sync(pack_weights(self._model.named_parameters(), version=1, dtype=self._dtype))
            self._model = None  # the object store holds it now
            player = PanelPlayer(config, RolloutWorkers(config, runners, engines))
            self._stack = starting.pop_all()
        return player

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
