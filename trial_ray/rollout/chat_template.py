"""A chat template in parts: what it writes around messages, as token ids that can be joined to the ids of the messages.

The template is rendered once, with probes for messages; what stands around them is tokenised once. So a message costs the
tokenisation of its own text, special tokens spelled in it stay ordinary text, and a sampled response keeps its ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from trial_ray.errors import ChatTemplateError
from trial_ray.rollout.hindsight import encode_untrusted

# Mixed case, markup, quotes, doubled blanks and a line break: any change that a chat template makes to text shows here.
_PROBE = 'Sentinel {} of  the <User>\'s & "message"\nends Here'


@dataclass(frozen=True, slots=True)
class Opening:
    """The text before a message of the system or the user.

    Attributes:
        ids: ids up to the last special token.
        lead_in: the text between it and the message, which is tokenised together with the message.
    """

    ids: list[int]
    lead_in: str


@dataclass(frozen=True, slots=True)
class ConversationParts:
    """The texts around the messages of a conversation.

    Attributes:
        system: before the system message.
        first: between the system message and the user's first one.
        later: between a response and the user's next message; its first id is the token that closes a response.
        suffix_ids: ids from a message of the user to the response.
    """

    system: Opening
    first: Opening
    later: Opening
    suffix_ids: list[int]


def split_user_message(tokenizer: Any) -> tuple[Opening, list[int]]:
    """Texts around the user's message where it is the only one: before it, and ids behind it.

    Raises:
        ChatTemplateError: there is no chat template, or it alters, repeats or does not delimit the message.
    """
    before, behind = _render(tokenizer, ["user"])
    opening, suffix_ids = _opening(tokenizer, before), _encode(tokenizer, behind)
    _require_special(tokenizer, behind, "the user's message")
    message = encode_untrusted(tokenizer, opening.lead_in + _probe(0))
    _require_same(tokenizer, before + _probe(0) + behind, [*opening.ids, *message, *suffix_ids])
    return opening, suffix_ids


def split_conversation(tokenizer: Any) -> ConversationParts:
    """Texts around the messages of a conversation that begins with the system's.

    The response in it is a probe without reasoning. What the template writes between a message of the user and an earlier
    response is not looked at: it may differ from what it writes before a new one, as Qwen3's does, and is never needed.

    Raises:
        ChatTemplateError: there is no chat template or none with a system message, or it alters, repeats or does not delimit a
            message, or writes a message in another way depending on what precedes or follows it.
    """
    before, between, suffix = _render(tokenizer, ["system", "user"])
    long_before, long_between, _, closing, long_suffix = _render(tokenizer, ["system", "user", "assistant", "user"])
    system, first, later = (_opening(tokenizer, text) for text in (before, between, closing))
    for text, name in ((between, "the system message"), (suffix, "the user's message"), (closing, "a response")):
        _require_special(tokenizer, text, name)
    same = (before, between, suffix) == (long_before, long_between, long_suffix)
    if not same or (first.ids[-1], first.lead_in) != (later.ids[-1], later.lead_in):
        raise ChatTemplateError(
            "the chat template opens or closes messages in another way when the conversation goes on, so that a longer "
            "conversation does not begin with a shorter one; use prompt_style='tagged', or a template that only appends"
        )
    parts = ConversationParts(system, first, later, _encode(tokenizer, suffix))
    task, message = (encode_untrusted(tokenizer, opening.lead_in + _probe(0)) for opening in (system, first))
    end = [*message, *parts.suffix_ids]
    _require_same(tokenizer, _probe(0).join((before, between, suffix)), [*system.ids, *task, *first.ids, *end])
    _require_same(tokenizer, closing + _probe(0) + suffix, [*later.ids, *end])
    return parts


def _render(tokenizer: Any, roles: Sequence[str]) -> list[str]:
    """The text around probes as messages of these roles, up to where the response starts; reasoning modes are switched off."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ChatTemplateError(
            "the tokenizer has no chat template; use an instruct model, or set tokenizer.chat_template"
        )
    probes = [_probe(index) for index in range(len(roles))]
    try:
        rendered: str = tokenizer.apply_chat_template(
            [{"role": role, "content": probe} for role, probe in zip(roles, probes, strict=True)],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
    except TemplateError as error:
        raise ChatTemplateError(f"the chat template cannot render messages of {', '.join(roles)}: {error}") from error
    pieces = []
    for role, probe in zip(roles, probes, strict=True):
        if rendered.count(probe) != 1:
            raise ChatTemplateError(
                f"the chat template must write every message once, unaltered and in order, but a probe as message of the {role} "
                f"occurs {rendered.count(probe)} times in what it renders; use a template that leaves messages as they are"
            )
        piece, rendered = rendered.split(probe)
        pieces.append(piece)
    return [*pieces, rendered]


def _probe(index: int) -> str:
    return _PROBE.format(index)


def _opening(tokenizer: Any, text: str) -> Opening:
    end = max((text.rfind(token) + len(token) for token in _special(tokenizer) if token in text), default=0)
    return Opening(_encode(tokenizer, text[:end]), text[end:])


def _special(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _require_special(tokenizer: Any, text: str, message: str) -> None:
    if not any(text.startswith(token) for token in _special(tokenizer)):
        raise ChatTemplateError(
            f"the chat template must close {message} with a special token, but goes on with {text[:40]!r}; "
            "without one, an observation could imitate the end of the message"
        )


def _require_same(tokenizer: Any, whole: str, parts: list[int]) -> None:
    if parts != _encode(tokenizer, whole):
        raise ChatTemplateError(
            "this tokenizer gives other ids for the conversation as a whole than for its parts (before, in and after "
            "the user's message); use a tokenizer whose special tokens separate text"
        )
