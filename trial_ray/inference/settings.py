"""Settings of the inference engines."""

from __future__ import annotations

from typing import Any

from trial_ray.errors import ConfigError
from trial_ray.inference.engine_arguments import NO_SLEEP, engine_dtype
from trial_ray.inference.pool import ENGINES
from trial_ray.inference.transfer import BACKENDS
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
    custom_resources_per_engine: dict[str, float] = setting(
        factory=dict,
        doc="custom resources that Ray reserves for each, by which engines get nodes of their own, as env runners do by RLlib's "
        "``custom_resources_per_env_runner`` and learners by ``custom_resources_per_learner``",
    )
    resource_timeout_s: float = setting(
        60.0,
        "how long to wait for CPUs and GPUs that the cluster does not have or others use, in seconds; more where an autoscaler "
        "starts nodes",
        above=0,
    )
    engine_start_timeout_s: float = setting(600.0, "deadline of the start of the whole pool, in seconds", above=0)
    colocate: bool = setting(
        False,
        "put engine ``i`` and learner ``i`` on one device: engines sleep while learners update. Needs as many engines as "
        "learners, whose shares ``num_gpus_per_engine`` and ``num_gpus_per_learner`` make up one GPU",
    )
    sleep_level: int = setting(
        1,
        "with ``colocate``, what becomes of the weights of an engine that sleeps: 1 keeps them in the host's memory, 2 drops "
        "them, since new ones follow every update",
        one_of=(1, 2),
    )
    weight_transfer: str = setting(
        "auto",
        'how weights travel to the engines: through Ray\'s ``"object_store"``; on CUDA with vLLM also by ``"ipc"`` (with '
        '``colocate``) or ``"nccl"`` (GPUs of their own). ``"auto"`` is ``"ipc"`` where it can be, else ``"object_store"``',
        one_of=("auto", *BACKENDS),
    )

    engines = Section("Choose the inference engines.")

    def engine_dtype(self) -> str:
        """Torch name of the type in which engines hold the weights, and the learner sends them.

        Raises:
            ConfigError: ``engine_kwargs`` names one in which no engine computes.
        """
        return engine_dtype(self.engine_kwargs.get("dtype"), on_gpu=self.num_gpus_per_engine > 0)

    def transfer_backend(self) -> str:
        """How weights travel, one of ``BACKENDS``."""
        if self.weight_transfer != "auto":
            return self.weight_transfer
        on_gpu = self.engine == "vllm" and self.num_gpus_per_engine > 0
        return "ipc" if self.colocate and on_gpu else "object_store"

    def workers_per_engine(self) -> int:
        """GPUs that one engine computes on."""
        return int(self.engine_kwargs.get("tensor_parallel_size", 1))

    def check_engines(self) -> None:
        """Refuse engines that cannot sleep where they have to, a transfer for which they lack the device, and doubled resources.

        Raises:
            ConfigError: says what to set.
        """
        if named := {"CPU", "GPU"} & self.custom_resources_per_engine.keys():
            raise ConfigError(
                f"custom_resources_per_engine holds {', '.join(sorted(named))}; set num_cpus_per_engine and num_gpus_per_engine."
            )
        on_gpu = self.engine == "vllm" and self.num_gpus_per_engine > 0
        if self.colocate and self.engine == "vllm" and not on_gpu:
            raise ConfigError(NO_SLEEP)
        if self.colocate and self.workers_per_engine() > 1:
            raise ConfigError(
                f"engine_kwargs: tensor_parallel_size is {self.workers_per_engine()}, but with colocate an engine has the one "
                "GPU of its learner; leave it out."
            )
        backend = self.transfer_backend()
        if backend != "object_store" and not on_gpu:
            raise ConfigError(
                f"weight_transfer is {backend!r}, which needs engine='vllm' with num_gpus_per_engine above 0; set "
                "'object_store'."
            )
        if (backend == "ipc") > self.colocate:
            raise ConfigError(
                "weight_transfer is 'ipc', by which an engine reads the memory of the learner on the same GPU; set colocate too."
            )
        if backend == "nccl" and self.colocate:
            raise ConfigError(
                "weight_transfer is 'nccl', which needs GPUs of their own for engines and learners; leave out colocate, or set "
                "'ipc'."
            )
