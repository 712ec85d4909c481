"""The policy of a warm start: its initial model, its device and threads, and its success in held-out games."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from trial_ray.adapters.adapter import Demonstrator, RandomAgent, begin
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.adapters.templates import ConversationPrompt, PromptContext
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import ChatTemplateError, CheckpointError, ConfigError
from trial_ray.evaluation.local_games import LocalGames
from trial_ray.evaluation.statistics import wilson_interval
from trial_ray.files import Json
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.models.tiny import build_tiny_model, build_tokenizer
from trial_ray.prompts.chat_template import TemplateOptions
from trial_ray.prompts.hermes import HermesBuilder, hermes_messages
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.tool_calls import ToolSet
from trial_ray.prompts.tool_conversation import ToolConversationBuilder, call_message
from trial_ray.prompts.writer import PromptWriter
from trial_ray.trajectory import Trajectory
from trial_ray.trust import require_data
from trial_ray.warmstart.settings import DEMONSTRATED, WarmStartSettings, task_set

_log = logging.getLogger(__name__)
RECORD = "warmstart.json"
"""File in a warm-started model's folder, with the settings and results of the warm start."""


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model and its tokenizer.

    Raises:
        CheckpointError: ``folder`` does not contain a model.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no model: config.json is missing. Give a folder in Hugging Face format.")
    return [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt", ".model")]


def recorded_settings(folder: Path) -> WarmStartSettings:
    """Return the settings that a model was warm-started with; the defaults if it was not made by a warm start.

    Raises:
        CheckpointError: the record cannot be read.
    """
    path = folder / RECORD
    if not path.is_file():
        return WarmStartSettings()
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        return WarmStartSettings(**require_data(settings, settings, {}, path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a record of a warm start of this version ({type(error).__name__}: {error}). Remove it, and state the "
            "settings with --set."
        ) from error


@dataclass(frozen=True)
class Policy:
    """A policy that imitates an expert, and its prompts.

    Attributes:
        settings: settings of the warm start.
        entry: the environment.
        model: causal LM in float32, on the settings' device.
        tokenizer: tokenizer of the model.
        builder: writes prompts exactly as in rollouts.
    """

    settings: WarmStartSettings
    entry: EnvironmentEntry
    model: PreTrainedModel
    tokenizer: Any
    builder: PromptWriter


def load_policy(settings: WarmStartSettings, entry: EnvironmentEntry) -> Policy:
    """Load the model at ``settings.model_path``, or create a tiny model; return it with its tokenizer and prompt writer.

    Raises:
        CheckpointError: ``model_path`` does not contain a model.
        ChatTemplateError: the tokenizer has no chat template or no end token.
        ConfigError: the model or its tokenizer cannot be loaded or trained; or ``response_style`` is ``tools``, but
            ``model_path`` and ``tool_format`` are ``None``.
    """
    if settings.response_style == "tools" and settings.model_path is None and settings.tool_format is None:
        raise ConfigError(
            "Warm-start setting response_style is 'tools', but the tiny model's chat template has no tools; set "
            "tool_format='hermes', which describes them in the system message, or model_path."
        )
    path = settings.model_path
    model: Any
    tokenizer: Any
    if path is None:
        vocabulary = entry.adapter.warm_start.vocabulary
        # The adapter's vocabulary lacks the words of tool schemas and calls.
        is_complete = bool(vocabulary) and settings.response_style != "tools"
        tokenizer = build_tokenizer(vocabulary, () if is_complete else collect_texts(settings, entry))
        model = build_tiny_model(tokenizer, settings.size, settings.seed)
    else:
        model_files(Path(path))
        tokenizer, model = load_tokenizer(path), load_causal_lm(path, "float32")
        if tokenizer.eos_token_id is None:
            raise ChatTemplateError(f"The tokenizer in {path} has no end token; set its eos_token.")
    options = TemplateOptions(settings.chat_template_kwargs, settings.chat_template_date)
    template = entry.adapter.template(settings.response_style)
    limits = settings.max_prompt_tokens, settings.history_window, options
    builder: PromptWriter
    if settings.response_style == "tools":
        conversation = cast(ConversationPrompt, template)
        kind = HermesBuilder if settings.tool_format == "hermes" else ToolConversationBuilder
        builder = kind(tokenizer, conversation, entry.adapter.tools, *limits)
    else:
        builder = PromptBuilder(tokenizer, template, *limits)
    return Policy(settings, entry, model.to(settings.device), tokenizer, builder)


def collect_texts(settings: WarmStartSettings, entry: EnvironmentEntry) -> Iterator[str]:
    """Yield the texts of one expert episode per demonstration task, for the vocabulary of a model without ``model_path``.

    Raises:
        ConfigError: the adapter has no expert and the environment lists no actions.
        EnvironmentFaultError: the environment fails.
    """
    entry, tasks = task_set(settings, entry, DEMONSTRATED)
    demonstrator, template = make_demonstrator(entry), entry.adapter.template(settings.response_style)
    tools = ToolSet(entry.adapter.tools) if settings.response_style == "tools" else None
    with closing(GuardedEnv(entry)) as env:
        for task_id in tasks:
            result = env.reset(task_id, 0)
            begin(demonstrator, result.task, result.observation, settings.seed, env.walkthrough)
            yield result.task
            last: list[tuple[str, str]] = []
            for step in range(1, env.max_turns + 1):
                if result.terminated or result.truncated:
                    break
                context = PromptContext(result.task, result.observation, result.admissible_actions, last, step)
                yield template.render(context)
                action = demonstrator.act(result.observation, result.admissible_actions)
                yield "\n".join((result.observation, *result.admissible_actions, action))
                if tools is not None:
                    yield from _tool_texts(tools, cast(ConversationPrompt, template).system(result.task), action)
                demonstrator.carried_out(action)
                last = [(result.observation, action)]
                result = env.step(action)


def _tool_texts(tools: ToolSet, system: str, action: str) -> Iterator[str]:
    """Yield the texts around observations in the Hermes format: tools, the tool call of an action, and tags of a tool's answer."""
    call = tools.call_of(action)
    messages = [
        {"role": "system", "content": system},
        *([call_message(call)] if call else []),
        {"role": "tool", "content": ""},
    ]
    yield from (message["content"] for message in hermes_messages(messages, tools.schemas))


def make_demonstrator(entry: EnvironmentEntry) -> Demonstrator:
    """Create the expert of the environment's adapter or, without one, an expert that draws actions at random."""
    return (entry.adapter.warm_start.demonstrator or RandomAgent)()


@contextmanager
def set_threads(settings: WarmStartSettings) -> Iterator[None]:
    """Set PyTorch's number of threads to the settings' number, and restore the previous number at the end of the context.

    Raises:
        ConfigError: ``device`` is ``cuda`` without a CUDA device.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "The warm start's setting device is 'cuda', but PyTorch finds no CUDA device here; set device=cpu, or compute on a "
            "machine that has one."
        )
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def success_figures(trajectories: Sequence[Trajectory]) -> Json:
    """Return statistics of played games by name.

    Returns:
        ``success_rate``; ``episodes``, the number of games; ``interval``, the 95 % Wilson interval of the success rate; and
        ``invalid_share``, the share of turns with an action that the environment did not understand.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    won, episodes = sum(trajectory.success for trajectory in trajectories), len(trajectories)
    return {
        "success_rate": won / episodes,
        "episodes": episodes,
        "interval": wilson_interval(won, episodes),
        "invalid_share": sum(turn.invalid_action for turn in turns) / max(1, len(turns)),
    }


def held_out_games(policy: Policy, purpose: int) -> LocalGames:
    """Return the tasks of a warm start on which the policy is checked or evaluated, to be played with the policy.

    Args:
        policy: policy that plays the tasks.
        purpose: ``CHECKED`` or ``EVALUATED``, as in :func:`~trial_ray.warmstart.settings.task_set`.
    """
    settings = policy.settings
    entry, tasks = task_set(settings, policy.entry, purpose)
    params = SamplingParams(settings.max_response_tokens)
    return LocalGames(entry, tasks, params, settings.seed, policy.model, policy.tokenizer, policy.builder)
