"""Settings of the inference engines."""

from __future__ import annotations

from typing import Any

from trial_ray.inference.engine_arguments import engine_dtype
from trial_ray.inference.pool import ENGINES
from trial_ray.settings import Section, Settings, setting


class EngineSettings(Settings):
    """Which engines sample responses, and what they take."""

    engine: str = setting("vllm", '``"vllm"`` or ``"transformers"``', one_of=ENGINES)
    num_engines: int = setting(1, "engine actors in the pool", at_least=1)
    engine_kwargs: dict[str, Any] = setting(
        factory=dict,
        doc="passed to the engine's constructor (``dtype``, ``tensor_parallel_size``, ...); with vLLM also fields of its "
        "``EngineArgs``. Without ``dtype``, engines compute in bfloat16 where each has a GPU, else in float32",
    )
    num_cpus_per_engine: float = setting(1.0, "CPUs that Ray reserves for each", at_least=0)
    num_gpus_per_engine: float = setting(0.0, "GPUs that Ray reserves for each", at_least=0)
    engine_start_timeout_s: float = setting(600.0, "deadline of the start of the whole pool, in seconds", above=0)

    engines = Section("Choose the inference engines.")

    def engine_dtype(self) -> str:
        """Torch name of the type in which engines hold the weights, and the learner sends them.

        Raises:
            ConfigError: ``engine_kwargs`` names one in which no engine computes.
        """
        return engine_dtype(self.engine_kwargs.get("dtype"), on_gpu=self.num_gpus_per_engine > 0)
