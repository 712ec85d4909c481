"""Prompt styles: the writer of a run's prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from trial_ray.config.run import RunSettings
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.templates import ConversationPrompt
from trial_ray.models.vocabulary import stop_token_ids
from trial_ray.rollout.chat_template import TemplateOptions
from trial_ray.rollout.conversation import ConversationBuilder
from trial_ray.rollout.prompts import PromptBuilder, PromptWriter
from trial_ray.rollout.tool_conversation import ToolConversationBuilder


def prompt_writer(tokenizer: Any, config: RunSettings, adapter: EnvironmentAdapter) -> PromptWriter:
    """The prompt writer of a run in one of its environments.

    Raises:
        ChatTemplateError: the tokenizer's chat template cannot be used in the style asked for, or ends responses of a conversation
            with a token at which the model in ``config.model_path`` does not stop.
        ConfigError, MissingDependencyError: as :class:`ToolConversationBuilder`.
    """
    template = adapter.template(config.prompt_style)
    settings = config.max_prompt_tokens, config.history_window, template_options(config)
    if config.prompt_style not in ("conversation", "tools"):
        return PromptBuilder(tokenizer, template, *settings)
    conversation = cast(ConversationPrompt, template)
    if config.prompt_style == "tools":
        writer: ConversationBuilder = ToolConversationBuilder(tokenizer, conversation, adapter.tools, *settings)
    else:
        writer = ConversationBuilder(tokenizer, conversation, *settings)
    if config.model_path is not None and Path(config.model_path).is_dir():
        writer.require_end(stop_token_ids(config.model_path))
    return writer


def template_options(config: RunSettings) -> TemplateOptions:
    """What the chat template of a run is rendered with."""
    return TemplateOptions(config.chat_template_kwargs, config.chat_template_date)
