"""RLlib's ``Algorithm`` interface except for training: user callbacks, checkpoints, and calls that are not supported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.tune.utils import flatten_dict

from trial_ray.errors import CallbackError, CheckpointError, ConfigError, UnsupportedError, refusing
from trial_ray.learner.learner import ONE_MODULE
from trial_ray.learner.state import reading_checkpoint
from trial_ray.metrics import METRICS, peek, table_key
from trial_ray.models.module import CausalLMModule
from trial_ray.rollout.callbacks import NEVER_CALLED, hooks_of

logger = logging.getLogger(__name__)


_OLD_API_STACK = "it is of RLlib's old API stack"


@refusing(
    {
        "add_module remove_module": ONE_MODULE,
        "evaluate_offline restore_offline_eval_runners": (
            "nothing is evaluated offline; evaluate() plays the evaluation set"
        ),
        "compute_single_action compute_actions": (
            "an action is a text that an engine samples; evaluate_sets() plays episodes, get_module() returns the model"
        ),
        "export_model export_policy_model export_policy_checkpoint": (
            "trial-ray export writes the model of a checkpoint as a Hugging Face folder"
        ),
        "get_policy": f"{_OLD_API_STACK}; get_module() returns the model",
        "add_policy remove_policy": _OLD_API_STACK,
        "from_state": f"{_OLD_API_STACK}; config.build_algo() and set_state() do it",
    }
)
class RLlibCalls(Algorithm):
    """Base class of :class:`~trial_ray.algorithms.grpo.GRPO`: RLlib's callbacks, and its ``Algorithm`` methods except for training.

    Attributes:
        is_stopped: whether ``stop`` has ended the actors.
    """

    is_stopped = False

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> RLModule | None:
        """Return a copy of the learner's module on the CPU, with gathered weights; ``None`` if there is no module with this id."""
        if module_id != DEFAULT_MODULE_ID:
            return None
        module: CausalLMModule = self.config.get_rl_module_spec(spaces=self.spaces).build()
        module.load(torch.device("cpu"), sharded=False)
        module.set_state(self.learner_group.get_weights()[module_id])
        return module

    @classmethod
    def from_checkpoint(cls, path: Any, filesystem: Any = None, **kwargs: Any) -> Self:
        """Build the algorithm of a checkpoint, and restore it; takes the arguments of RLlib's method.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        if filesystem is None and isinstance(path, str | Path):
            require_parts(path, COMPONENT_FILE)
        return super().from_checkpoint(path, filesystem, **kwargs)

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config: Any) -> bool:
        # Evaluation needs no env runners of its own: the env runners of training play the evaluation sets.
        return False

    def restore_env_runners(self, env_runner_group: EnvRunnerGroup) -> list[int]:
        """Connect restarted env runners to the engines again, and return their ids; they have no learned state to restore."""
        return self.workers.restore_runners()

    def set_weights(self, weights: dict[str, dict[str, Any]]) -> None:
        """Load weights in the format of ``get_weights()`` (arrays by module id and tensor name) and send them to the engines.

        Raises:
            CheckpointError: the weights are of another model.
        """
        self.learner_group.set_weights(weights)

    def save_to_path(
        self, path: str | Path | None = None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> str:
        """Write a checkpoint of the current state; the learners write the weights to files.

        Raises:
            ConfigError: ``state`` was given, or the path is not a folder.
            CheckpointError: not every learner can access the folder.
        """
        if state is not None:
            raise ConfigError("save_to_path() writes the present state, but got another state; call set_state() first.")
        if kwargs.get("filesystem") is not None or "://" in str(path):
            raise ConfigError(
                f"save_to_path() writes into a folder, but got {path!r}. Save into one, and copy it with pyarrow.fs.copy_files."
            )
        return super().save_to_path(path, state=self.get_state(inference_only=True), **kwargs)

    def restore_from_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Restore a checkpoint, send its weights to the engines, and call the callback ``on_checkpoint_loaded``.

        Raises:
            CheckpointError: a file is damaged, or a file is missing; if one is missing, nothing was changed.
        """
        if not kwargs.get("component") and not kwargs.get("filesystem"):
            require_parts(path)
        self.learner_group.make_room(self.engine_pool)
        self.learner_group.weights_set = None  # Send the weights once, after everything is restored.
        try:
            with reading_checkpoint(path):
                super().restore_from_path(path, *args, **kwargs)
        finally:
            self.learner_group.weights_set = self._send_set_weights
        self._sync_weights()
        self._call_back("on_checkpoint_loaded")

    # -- callbacks -------------------------------------------------------------------------------------------------

    def _set_up_callbacks(self) -> None:
        """Warn about the user's callbacks that are never called, and create the logger for metrics of callbacks in evaluations."""
        # A separate logger is needed: self.metrics cannot read a key to which both env runners and the driver log.
        self._logged_in_evaluation = MetricsLogger(root=True, stats_cls_lookup=self.config.stats_cls_lookup)
        for hook in hooks_of(force_list(self.callbacks), self.config, NEVER_CALLED):
            logger.warning("the callback %s is never called: %s", hook, NEVER_CALLED[hook])

    def _require_running(self, call: str) -> None:
        """Reject a call that needs the actors if :meth:`stop` has ended them."""
        if self.is_stopped:
            raise UnsupportedError(
                f"{type(self).__name__}.{call}() was called after stop(), which has ended all actors. Build another algorithm with "
                "config.build_algo(), and restore a checkpoint with restore_from_path()."
            )

    def _call_back(self, hook: str, **arguments: Any) -> None:
        """Call one of the user's callbacks in this process; its errors are raised."""
        make_callback(
            hook,
            callbacks_objects=self.callbacks,
            callbacks_functions=getattr(self.config, f"callbacks_{hook}"),
            kwargs={"algorithm": self, **arguments},
        )

    def _call_recreated(self, runner_ids: list[int]) -> None:
        """Call ``on_env_runners_recreated`` for runners restarted during an iteration; RLlib calls it only before iterations."""
        self._call_back(
            "on_env_runners_recreated",
            env_runner_group=self.env_runner_group,
            env_runner_indices=runner_ids,
            is_evaluation=False,
        )

    def _log_callbacks(self, logged: Sequence[Mapping[str, Any]], *, in_evaluation: bool = False) -> None:
        """Merge the metrics that callbacks on env runners have logged, under RLlib's keys.

        Raises:
            CallbackError: a callback logged under the key of a metric of this package.
        """
        place = (EVALUATION_RESULTS, ENV_RUNNER_RESULTS) if in_evaluation else (ENV_RUNNER_RESULTS,)
        for key in {"/".join((*place, name)) for metrics in logged for name in flatten_dict(dict(metrics))}:
            if table_key(key) in METRICS:
                raise CallbackError(f"A callback logs {key}, which is logged already; choose another name.")
        # Aggregate each dict of metrics in a separate call: RLlib cannot merge several values of reduce="item".
        for metrics in logged:
            if in_evaluation:
                self._logged_in_evaluation.aggregate([metrics])
            else:
                self.metrics.aggregate([metrics], key=place)

    def _evaluation_result(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return the result of an evaluation: its metrics, and the metrics that callbacks logged under ``evaluation/``."""
        in_driver: dict[str, Any] = self.metrics.peek(EVALUATION_RESULTS, default={})
        result = {**in_driver, ENV_RUNNER_RESULTS: {**self._logged_in_evaluation.compile(), **figures}}
        self._call_back("on_evaluate_end", metrics_logger=self.metrics, evaluation_metrics=result)
        return result

    def _compile_iteration_results(self, *, train_results: Any, eval_results: Any) -> dict[str, Any]:
        """Return the result of an iteration, without metrics of evaluations in earlier iterations."""
        result: dict[str, Any] = super()._compile_iteration_results(
            train_results=train_results, eval_results=eval_results
        )
        if not eval_results:
            result.pop(EVALUATION_RESULTS, None)  # Remove metrics that callbacks logged in an earlier evaluation.
        seconds = dict(result.get("seconds", {}))
        seconds.pop("evaluation", None)  # Remove the duration of a call of evaluate() outside train().
        if eval_results and (duration := peek(self.metrics, "seconds/evaluation")) is not None:
            seconds["evaluation"] = duration
        self.metrics.delete("seconds", "evaluation", key_error=False)  # Report each evaluation's duration only once.
        return {**result, "seconds": seconds}

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Restore a checkpoint; RLlib's method would call ``on_checkpoint_loaded`` again after ``restore_from_path``."""
        self.restore_from_path(checkpoint_dir)


COMPONENT_FILE = "class_and_ctor_args.pkl"
"""File of a checkpoint with the class and the config from which RLlib's ``from_checkpoint`` builds the algorithm."""
_PARTS = (
    "algorithm_state",
    "learner_group/state",
    "learner_group/learner/state",
    "learner_group/learner/rl_module/module_state",
)
"""Required files of a checkpoint (pickle or msgpack); if one is missing, RLlib restores an algorithm only in part, or fails after
building it."""


def require_parts(path: str | Path, *files: str) -> None:
    """Reject a folder that is not a whole checkpoint; URIs of other file systems are not checked.

    Raises:
        CheckpointError: the folder does not exist, or a file is missing.
    """
    if "://" in str(path):
        return
    folder = Path(path)
    missing = [name for name in files if not (folder / name).is_file()]
    missing += [f"{name}.pkl" for name in _PARTS if not any(folder.glob(f"{name}.*"))]
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}, so no checkpoint can be restored from it.")
    if missing:
        raise CheckpointError(f"{folder} is not a whole checkpoint: {missing[0]} is missing. Restore another one.")
