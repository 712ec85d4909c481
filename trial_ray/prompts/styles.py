"""Creates the prompt writer for a run's prompt style."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.external import ProgramTemplate
from trial_ray.adapters.templates import CONVERSATIONS, ConversationPrompt
from trial_ray.config.run import RunSettings
from trial_ray.models.model_shape import stop_token_ids
from trial_ray.prompts.call_conversation import CallWriter
from trial_ray.prompts.chat_template import TemplateOptions
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.hermes import HermesBuilder
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.prompts.writer import PromptWriter


def prompt_writer(tokenizer: Any, config: RunSettings, adapter: EnvironmentAdapter) -> PromptWriter:
    """Create the prompt writer of a run for one of its environments.

    Raises:
        ChatTemplateError: the tokenizer's chat template cannot be used in the configured style, or ends the responses of a
            conversation with a token that is not a stop token of the model in ``config.model_path``.
        ConfigError, MissingDependencyError: as in :class:`ToolConversationBuilder`.
    """
    template = adapter.template(config.prompt_style)
    settings = config.max_prompt_tokens, config.history_window, template_options(config)
    if config.prompt_style not in CONVERSATIONS:
        return PromptBuilder(tokenizer, template, *settings)
    conversation = cast(ConversationPrompt, template)
    writer: PromptWriter
    if isinstance(template, ProgramTemplate):
        shortens = config.program_long_calls == "shorten"
        writer = CallWriter(tokenizer, template, *settings, tool_format=config.tool_format, shortens=shortens)
    elif config.prompt_style == "tools":
        kind = HermesBuilder if config.tool_format == "hermes" else ToolConversationBuilder
        writer = kind(tokenizer, conversation, adapter.tools, *settings)
    else:
        writer = ConversationBuilder(tokenizer, conversation, *settings)
    if config.model_path is not None and Path(config.model_path).is_dir():
        writer.require_end(stop_token_ids(config.model_path))
    return writer


def template_options(config: RunSettings) -> TemplateOptions:
    """Return the arguments of a run's chat template."""
    return TemplateOptions(config.chat_template_kwargs, config.chat_template_date)
