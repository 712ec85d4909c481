"""What RLlib builds from a config: module specs, learners and the algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from trial_ray.algorithms.placement import LEARNERS_PLACED
from trial_ray.config.run import RunSettings

if TYPE_CHECKING:
    from typing import Self

    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.util.placement_group import PlacementGroup

    from trial_ray.algorithms.learner_group import PolicyLearnerGroup
    from trial_ray.learner.learner import GRPOLearner


class BuildCalls(RunSettings, AlgorithmConfig):
    """Base class of :class:`~trial_ray.algorithms.grpo.GRPOConfig` that implements RLlib's calls which build something.

    Specs and learners are built of a model folder: a model on the hub is downloaded, a packaged model and a warm start are created,
    each once. All spaces are texts, so ``env`` and ``spaces`` can be omitted.
    """

    def get_default_learner_class(self) -> type:
        """Return the learner that computes this method's loss."""
        from trial_ray.learner.learner import GRPOLearner

        return GRPOLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """Return the spec of the causal LM that is trained."""
        from trial_ray.models.module import CausalLMModule

        return RLModuleSpec(module_class=CausalLMModule)

    def get_rl_module_spec(
        self, env: Any = None, spaces: Any = None, inference_only: bool | None = None
    ) -> RLModuleSpec:
        """Return the spec of the module, of which ``build()`` makes one; arguments are RLlib's."""
        return AlgorithmConfig.get_rl_module_spec(self._with_folder(), None, spaces or _text_spaces(), inference_only)

    def get_multi_rl_module_spec(self, *, env: Any = None, spaces: Any = None, **kwargs: Any) -> MultiRLModuleSpec:
        """Return the spec of a ``MultiRLModule`` with the module; arguments are RLlib's."""
        config = self._with_folder()
        return AlgorithmConfig.get_multi_rl_module_spec(config, spaces=spaces or _text_spaces(), **kwargs)

    def build_learner(self, *, env: Any = None, spaces: Any = None) -> GRPOLearner:
        """Build a learner in this process; arguments are RLlib's."""
        learner: GRPOLearner = AlgorithmConfig.build_learner(self._with_folder(), spaces=spaces or _text_spaces())
        return learner

    def build_learner_group(
        self,
        *,
        rl_module_spec: Any = None,
        placement_group: PlacementGroup | None = None,
        **kwargs: Any,
    ) -> PolicyLearnerGroup:
        """Build the learners; if they share devices with engines, they are placed in the placement group of both."""
        from trial_ray.algorithms.learner_group import PolicyLearnerGroup

        config = self._with_folder()
        return PolicyLearnerGroup(
            config=config.copy(),
            module_spec=rl_module_spec or config.get_multi_rl_module_spec(**kwargs),
            placement_group=placement_group or LEARNERS_PLACED.get(),
        )

    def build_algo(self, env: str | None = None, use_copy: bool = True) -> Algorithm:
        """Build the algorithm, as RLlib does; an ``env`` is selected as by ``environment()``, with its adapter's defaults."""
        if env is not None:
            self.environment(env)
        return super().build_algo(use_copy=use_copy)

    def _with_folder(self) -> Self:
        """Return the config, or a copy with the folder of its model; see ``resolved``."""
        if self.warm_start is None and Path(str(self.model_path)).is_dir():
            return self
        from trial_ray.algorithms.startup import resolved

        return resolved(self, None)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        included: dict[str, Any] = super()._model_config_auto_includes
        return included | {
            "model_path": self.model_path,
            "model_dtype": self.model_dtype,
            "compute_dtype": self.compute_dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            "compile_layers": self.compile_layers,
            "lora": self.lora_settings(),
            "with_reference": self.ref_kl_coeff > 0,
            "with_teacher": self.teacher_sync_iterations is not None,
        }


def _text_spaces() -> dict[str, Any]:
    from trial_ray.rollout.env_runner import SPACES

    return SPACES
