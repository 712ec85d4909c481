"""Computes the token ids that a chat template writes around messages, to be joined with the ids of the messages.

The template is rendered once with placeholder messages (probes), and the text around them is tokenised once. A prompt then
costs only the tokenisation of its messages, and sampled responses keep their ids. If a message contains the text of a control
token such as ``<|im_end|>``, that text is encoded as ordinary text.
"""

from __future__ import annotations

import datetime
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from trial_ray.errors import ChatTemplateError, ConfigError
from trial_ray.files import text_digest

REASONING_TAGS = frozenset({"<think>", "</think>"})
"""Tags around reasoning. They are single tokens in many tokenizers, special tokens in some, and do not delimit messages."""
_controls: WeakKeyDictionary[Any, tuple[Any, dict[int, str]]] = WeakKeyDictionary()


def ordinary_controls(tokenizer: Any) -> dict[int, str]:
    """Return, by id, the added tokens that are not special but appear in the chat template, such as DeepSeek's ``<｜User｜>``."""
    template = getattr(tokenizer, "chat_template", None)
    cached = _controls.get(tokenizer)
    if cached is None or cached[0] != template:
        source = str(template)
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if not token.special}
        controls = {id_: text for id_, text in added.items() if text in source and _is_control(text)}
        cached = _controls[tokenizer] = template, controls
    return cached[1]


def _is_control(text: str) -> bool:
    """Return whether a token has both letters and punctuation, unlike the words and line breaks that Gemma adds as tokens."""
    return text not in REASONING_TAGS and any(map(str.isalpha, text)) and not text.replace(" ", "").isalnum()


def encode_untrusted(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of ``text`` without any control token, even if the text contains the text of a control token.

    ``<|im_end|>`` in an observation is tokenised as its characters, so it cannot end the message that contains it. The tokens
    of :func:`ordinary_controls` are treated in the same way. Nothing is added before or after the text. Lone surrogates, which
    have no UTF-8 form, become ``?``.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        text: any text.
    """
    well_formed = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    ids = _encode(tokenizer, well_formed)
    if (controls := ordinary_controls(tokenizer)) and not controls.keys().isdisjoint(ids):
        starts = re.finditer(f"(?={'|'.join(map(re.escape, controls.values()))})", well_formed)
        cuts = [0, *(match.start() + 1 for match in starts), len(well_formed)]
        ids = [id_ for cut in pairwise(cuts) for id_ in _encode(tokenizer, well_formed[slice(*cut)])]
        # If a control token remains, the tokenizer's normaliser has converted other characters to its text.
        if not controls.keys().isdisjoint(ids):
            ids = [id_ for char in well_formed for id_ in _encode(tokenizer, char)]
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text; special tokens in it are encoded as ordinary text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    # Call the tokenizer's backend directly: transformers spends most of its time on masks and offsets. Change
    # a setting of the backend only if its value differs, because another thread may be encoding.
    if not backend.encode_special_tokens:
        backend.encode_special_tokens = True
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


# The probe's mixed case, markup, quotes, double space and line break reveal any change that a chat template makes to a text.
_PROBE = 'Sentinel {} of  the <User>\'s & "message"\nends Here'
HEAD_END = "\n\n"
"""Separator between the head (role, task and response format) and the first message, if both are in one user message."""


@dataclass(frozen=True)
class TemplateOptions:
    """Arguments of a chat template other than the messages.

    Attributes:
        kwargs: the run's ``chat_template_kwargs``.
        date: day, ``YYYY-MM-DD``, that a template writes as today's date, or ``None`` for the day of rendering.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None


@dataclass(frozen=True)
class Around:
    """Text that a chat template writes around a message of the system, the user or a tool.

    Attributes:
        ids: ids before the message, up to the last special token.
        lead_in: text between the last special token and the message, tokenised together with the message.
        lead_out: text between the message and the next special token, tokenised together with the message.
        quoted: whether the message is written as the inside of a JSON string.
    """

    ids: list[int]
    lead_in: str
    lead_out: str
    quoted: bool = False

    def encode(self, tokenizer: Any, message: str) -> list[int]:
        """Return the ids of an untrusted message with its ``lead_in`` and ``lead_out``."""
        written = json_string(message) if self.quoted else message
        return encode_untrusted(tokenizer, self.lead_in + written + self.lead_out)


@dataclass(frozen=True)
class ConversationParts:
    """Texts around the messages of a conversation.

    Attributes:
        system: text around the system message; ``None`` if the template does not delimit a system message. The system text
            is then at the beginning of the user's first message.
        first: text around the user's first message.
        later: text around the user's later messages; its first id is the token that closes a response.
        suffix_ids: ids between a message of the user and the response.
        end_ids: special tokens that close the last response; the policy must stop at one of these tokens.
    """

    system: Around | None
    first: Around
    later: Around
    suffix_ids: list[int]
    end_ids: frozenset[int]


def split_user_message(tokenizer: Any, options: TemplateOptions) -> tuple[Around, list[int]]:
    """Return the text that the template writes around a single user message, and the ids from its end to the response.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template alters, repeats or does not delimit the
            message.
        ConfigError: ``options`` have a template argument that this package sets itself.
    """
    before, behind = render(tokenizer, ["user"], options)
    around, rest = find_around(tokenizer, before, behind, "the user's message")
    suffix_ids = encode_trusted(tokenizer, rest)
    whole = [*around.ids, *around.encode(tokenizer, probe(0)), *suffix_ids]
    require_same(tokenizer, before + probe(0) + behind, whole)
    return around, suffix_ids


def split_conversation(tokenizer: Any, options: TemplateOptions) -> ConversationParts:
    """Return the texts around the messages of a conversation that begins with role, task and response format.

    Role, task and response format are the system message or, if the template does not delimit a system message, the beginning of
    the user's first message. The template is rendered with a response without reasoning. The text between a user message and an
    earlier response is not checked, because it is never needed: in some templates, such as Qwen3's, it differs from the text
    before a new response.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template alters, repeats or does not delimit a
            message, or writes a message differently depending on the messages before or after it.
        ConfigError: an option is an argument that this package sets itself.
    """
    try:
        return _split(tokenizer, options, ["system"])
    except ChatTemplateError:
        return _split(tokenizer, options, [])


def _split(tokenizer: Any, options: TemplateOptions, system: list[str]) -> ConversationParts:
    *head, opens, suffix = render(tokenizer, [*system, "user"], options)
    *long_head, long_opens, _, closing, long_suffix = render(tokenizer, [*system, "user", "assistant", "user"], options)
    around_system = None
    if system:
        around_system, opens = find_around(tokenizer, head[0], opens, "the system message")
        _, long_opens = find_around(tokenizer, long_head[0], long_opens, "the system message")
    first, rest = find_around(tokenizer, opens, suffix, "the user's message")
    later, _ = find_around(tokenizer, closing, long_suffix, "the user's message")
    if not closing.startswith(tuple(control_tokens(tokenizer))):
        raise not_delimited("a response", closing)
    same = (head, opens, suffix) == (long_head, long_opens, long_suffix)
    if not same or (first.ids[-1:], first.lead_in) != (later.ids[-1:], later.lead_in):
        raise ChatTemplateError(
            "The chat template writes earlier messages differently when the conversation continues, so a longer conversation does "
            "not start with the shorter one. Use prompt_style='tagged', or a template that only appends."
        )
    # In some templates, nothing closes a response except the opening of the next message.
    ends = _end_ids(tokenizer, options) or frozenset(later.ids)
    parts = ConversationParts(around_system, first, later, encode_trusted(tokenizer, rest), ends)
    require_beginning(tokenizer, parts, "".join(head), opens, suffix)
    turn = [*later.ids, *later.encode(tokenizer, probe(0)), *parts.suffix_ids]
    require_same(tokenizer, closing + probe(0) + suffix, turn)
    return parts


def _end_ids(tokenizer: Any, options: TemplateOptions) -> frozenset[int]:
    """Return the special tokens after the last response.

    The result is empty if the template writes none, or if it rejects conversations that end with a response.
    """
    with suppress(ChatTemplateError):
        _, _, end = render(tokenizer, ["user", "assistant"], options, add_generation_prompt=False)
        special = set(control_tokens(tokenizer))
        return frozenset(
            id_ for id_ in encode_trusted(tokenizer, end) if tokenizer.convert_ids_to_tokens(id_) in special
        )
    return frozenset()


def require_beginning(tokenizer: Any, parts: ConversationParts, head: str, opens: str, suffix: str) -> None:
    """Require that a placeholder conversation whose only user message is its last message is encoded as its parts.

    The parts are encoded separately, as in the prompts of an episode.

    Args:
        tokenizer: tokenizer with the chat template.
        parts: texts around the messages.
        head: rendered text before the system message; ignored without a system message.
        opens: rendered text before the user's message, from the first special token after the system message on.
        suffix: rendered text after the user's message.

    Raises:
        ChatTemplateError: the ids differ, or the text before a message cannot be separated from the message.
    """
    system, first = parts.system, parts.first
    message = first.encode(tokenizer, probe(0))
    if system is not None:
        ids = [*system.ids, *system.encode(tokenizer, probe(1)), *first.ids, *message]
        written = head + probe(1) + system.lead_out + opens
    else:
        # Tokenise the head (role, task and response format) separately from the user's message: later turns have no head.
        folded, lead_in = encode_head(tokenizer, first, probe(1)), encode_untrusted(tokenizer, first.lead_in)
        if message[: len(lead_in)] != lead_in:
            raise ChatTemplateError(
                f"This tokenizer merges {first.lead_in!r}, which the chat template writes before a message, with the message's "
                "first word, so the two cannot be separated. Use prompt_style='tagged'."
            )
        ids = [*first.ids, *folded, *message[len(lead_in) :]]
        written = opens + probe(1) + HEAD_END
    require_same(tokenizer, written + probe(0) + suffix, [*ids, *parts.suffix_ids])


def encode_head(tokenizer: Any, first: Around, text: str) -> list[int]:
    """Return the ids of the head of the user's first message (role, task and response format), with its ``lead_in``."""
    return encode_untrusted(tokenizer, first.lead_in + text + HEAD_END)


def describe_chat_template(tokenizer: Any, options: TemplateOptions) -> dict[str, Any]:
    """Describe a chat template: digest of the text around messages, arguments, and the date if the template writes it.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or it cannot be rendered.
    """
    written = _written(tokenizer, options)
    description = {"digest": text_digest(written).hex()[:16], "kwargs": dict(options.kwargs)}
    # Render with two dates that differ in day, month and year, to find out whether the template writes the date.
    texts = {_written(tokenizer, TemplateOptions(options.kwargs, day)) for day in ("1999-12-31", "2028-02-01")}
    return {**description, "date": str(_day(options))} if len(texts) > 1 else description


def _written(tokenizer: Any, options: TemplateOptions) -> str:
    """Return the text that the template writes around the messages of conversations with and without system message and response.

    Conversations that the template rejects are omitted, except the one with a single user message.
    """
    texts = render(tokenizer, ["user"], options)
    for roles in (["system", "user"], ["user", "assistant", "user"]):
        with suppress(ChatTemplateError):
            texts += ["", *render(tokenizer, roles, options)]
    return "\0".join(texts)


def _day(options: TemplateOptions) -> datetime.date:
    return datetime.date.today() if options.date is None else datetime.date.fromisoformat(options.date)


# -- rendering ---------------------------------------------------------------------------------------------------------


def render(
    tokenizer: Any,
    roles: Sequence[str | Mapping[str, Any]],
    options: TemplateOptions,
    *,
    quoted: bool = False,
    **further: Any,
) -> list[str]:
    """Render placeholder messages (probes); return the texts around the probes, up to the start of the response.

    A probe is a string, or a list of parts if the template does not render strings.

    Args:
        tokenizer: tokenizer with the chat template.
        roles: for each message its role, or the message itself; the content of messages without ``content`` is a probe.
        options: arguments of the template.
        quoted: whether the last probe is written as a JSON string.
        further: further arguments of ``apply_chat_template``.

    Raises:
        ChatTemplateError: the template rejects the messages, or alters or repeats a probe.
        ConfigError: an option is an argument that this package sets itself.
    """
    messages: list[dict[str, Any]] = [{"role": role} if isinstance(role, str) else dict(role) for role in roles]
    probed = [message for message in messages if "content" not in message]
    probes = [probe(len(probed) - 1 - index) for index in range(len(probed))]
    written = [*probes[:-1], json_string(probes[-1])] if quoted else probes
    first_error: ChatTemplateError | None = None
    for in_parts in (False, True):
        for message, text in zip(probed, probes, strict=True):
            message["content"] = [{"type": "text", "text": text}] if in_parts else text
        try:
            rendered = write_messages(tokenizer, messages, options, **further)
            return _pieces(rendered, [message["role"] for message in probed], written)
        except ChatTemplateError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def write_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: TemplateOptions, **further: Any
) -> str:
    """Return the text that the chat template writes for messages, up to the start of the response.

    Args:
        tokenizer: tokenizer with the chat template.
        messages: messages of the chat API.
        options: arguments of the template.
        further: further arguments of ``apply_chat_template``.

    Raises:
        ChatTemplateError: the tokenizer has no chat template, or the template rejects the messages.
        ConfigError: an option is an argument that this package sets itself.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ChatTemplateError(
            "The tokenizer has no chat template. Use an instruct model, or set tokenizer.chat_template."
        )
    arguments = {"add_generation_prompt": True, **further, "tokenize": False}
    reserved = {"self", "strftime_now", *inspect.signature(type(tokenizer).apply_chat_template).parameters, *arguments}
    if wrong := sorted(reserved & options.kwargs.keys()):
        raise ConfigError(
            f"chat_template_kwargs has {', '.join(map(repr, wrong))}, which this package sets itself; expected variables of the "
            "template, such as enable_thinking."
        )
    date = _day(options)
    try:
        return str(tokenizer.apply_chat_template(messages, **arguments, **options.kwargs, strftime_now=date.strftime))
    except Exception as error:  # A template is a program and may raise any exception.
        names = ", ".join(message["role"] for message in messages)
        raise ChatTemplateError(f"The chat template cannot render messages of {names}: {error}") from error


def _pieces(rendered: str, roles: Sequence[str], probes: Sequence[str]) -> list[str]:
    """Return the texts around the probes in a rendered conversation."""
    pieces = []
    for role, text in zip(roles, probes, strict=True):
        if rendered.count(text) != 1:
            raise ChatTemplateError(
                f"The chat template must write every message once, unaltered and in order, but a probe as message of the {role} "
                f"occurs {rendered.count(text)} times in its output. Use a template that does not alter messages."
            )
        piece, rendered = rendered.split(text)
        pieces.append(piece)
    return [*pieces, rendered]


def json_string(text: str) -> str:
    """Return a text as a JSON string without the quotes around it, as chat templates write it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def probe(index: int) -> str:
    """Return the placeholder for a message's content in tests of a chat template; ``index`` is 0 for the last message."""
    return _PROBE.format(index)


def find_around(tokenizer: Any, before: str, behind: str, message: str) -> tuple[Around, str]:
    """Return the text around a message up to the nearest special tokens, and the rest of ``behind``.

    Args:
        tokenizer: tokenizer with the special tokens.
        before: rendered text before the message.
        behind: rendered text after the message.
        message: name of the message in error messages.

    Raises:
        ChatTemplateError: no special token follows the message, so an observation could imitate the end of the message.
    """
    _, end = controls_within(tokenizer, before)
    closes, closing_end = controls_within(tokenizer, behind)
    if not closing_end:
        raise not_delimited(message, behind)
    return Around(encode_trusted(tokenizer, before[:end]), before[end:], behind[:closes]), behind[closes:]


def control_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of the special tokens and of :func:`ordinary_controls`."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return [*special, *ordinary_controls(tokenizer).values()]


def controls_within(tokenizer: Any, text: str) -> tuple[int, int]:
    """Return the start of the first and the end of the last control token in a text; (0, 0) if there is none."""
    tokens = [token for token in control_tokens(tokenizer) if token in text]
    return min(map(text.find, tokens), default=0), max((text.rfind(token) + len(token) for token in tokens), default=0)


def encode_trusted(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that a chat template wrote, control tokens included."""
    return tokenizer.encode(text, add_special_tokens=False)


def not_delimited(message: str, text: str) -> ChatTemplateError:
    """Return the error for a message that no special token closes."""
    return ChatTemplateError(
        f"The chat template must close {message} with a special token, but continues with {text[:40]!r}. Without a special token, "
        "an observation could imitate the end of the message."
    )


def require_same(tokenizer: Any, whole: str, parts: list[int]) -> None:
    """Require that the tokenizer encodes the text ``whole`` as ``parts``.

    Raises:
        ChatTemplateError: the ids differ.
    """
    if parts != encode_trusted(tokenizer, whole):
        raise ChatTemplateError(
            "This tokenizer encodes the whole conversation differently from its parts (before, in and after the user's message). "
            "Use a tokenizer whose special tokens separate text."
        )
