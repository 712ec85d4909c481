"""Client of an OpenAI-compatible chat endpoint, with deadlines and retries."""

from __future__ import annotations

import email.message
import http.client
import json
import os
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from trial_ray.errors import EngineError, PromptTooLongError, UserInputError, first_line
from trial_ray.files import HIDDEN, redacted

ATTEMPTS = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LONGEST_ANSWER = 16 * 2**20
"""Bytes; a longer answer is refused."""
RETRIED = frozenset({408, 409, 425, 429})
"""Status codes below 500 that a later request may not get."""
Message = dict[str, str]
"""``role`` and ``content``."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer of an endpoint.

    Attributes:
        text: of the message; empty where it has no text.
        finish_reason: ``"length"`` where the limit of tokens was reached, else ``"stop"``.
        prompt_tokens: as the endpoint counted them; 0 where it does not say.
    """

    text: str
    finish_reason: str
    prompt_tokens: int


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the key to another host, and lose its body."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return None


@dataclass(frozen=True)
class ChatEndpoint:
    """``POST {url}/chat/completions``; the environment's proxies hold, redirects are not followed.

    The key is read from the environment for each request and stands in no attribute, message or file.

    Attributes:
        url: such as ``http://127.0.0.1:8000/v1``.
        model: the name that the endpoint knows the model by.
        key_variable: environment variable with the key; ``None`` sends none.
        timeout_s: deadline of one request.
        body: fields that are added to each request or replace its own; one that is ``None`` is left out.
        sleep: waits between attempts.

    Raises:
        UserInputError: the URL is none of HTTP, or holds a password; the variable is not set.
    """

    url: str
    model: str
    key_variable: str | None = None
    timeout_s: float = 120.0
    body: Mapping[str, Any] = field(default_factory=dict)
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UserInputError(
                "--endpoint expects http://HOST:PORT/v1 or https://HOST/v1, without query or fragment."
            )
        if "@" in parts.netloc:
            raise UserInputError("--endpoint holds a user or password; give a key with --api-key-env VARIABLE instead.")
        if self.key_variable and not os.environ.get(self.key_variable):
            raise UserInputError(
                f"--api-key-env {self.key_variable}: the environment has no such variable, or it is empty."
            )

    def answer(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> ChatAnswer:
        """Send a conversation, and again after a pause where the endpoint is busy, broken or too slow.

        Args:
            messages: oldest first.
            sampling: ``temperature``, ``max_tokens`` and the like.

        Raises:
            PromptTooLongError: the endpoint says that the prompt exceeds the model's context.
            UserInputError: the endpoint refuses the request: key, model or a field is wrong.
            EngineError: every attempt failed.
        """
        fields = {"model": self.model, "messages": list(messages), **sampling, **self.body}
        payload = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        pause = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _read_answer(self._post(payload))
            except urllib.error.HTTPError as error:
                with error:
                    text, wanted = self._clean(_start_of(error)), _retry_after(error.headers)
                if error.code < 500 and error.code not in RETRIED:
                    raise self._refused(error.code, text) from None
                found = f"status {error.code}: {text}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                found, wanted = self._clean(f"{type(error).__name__}: {first_line(error)}"), None
            if attempt < ATTEMPTS:
                # Many games wait at once; without the random part all would come back at once.
                self.sleep(min(LONGEST_PAUSE_S, wanted if wanted is not None else pause * random.uniform(0.5, 1.0)))
                pause *= 2
        raise EngineError(f"{self.url} gave no answer in {ATTEMPTS} attempts; the last: {found}")

    def _post(self, payload: bytes) -> bytes:
        """The body of the answer.

        Raises:
            TimeoutError: it was not complete after ``timeout_s``.
        """
        headers = {"Content-Type": "application/json", "User-Agent": "trial-ray"}
        if self.key_variable:
            headers["Authorization"] = f"Bearer {os.environ[self.key_variable].strip()}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", payload, headers)
        deadline = time.monotonic() + self.timeout_s
        parts, size = [], 0
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=self.timeout_s) as response:
            # One call a piece: the socket's own timeout begins again with each byte that arrives.
            while piece := response.read1(65_536):
                parts.append(piece)
                size += len(piece)
                if size > LONGEST_ANSWER:
                    raise ValueError(f"the answer has more than {LONGEST_ANSWER:,} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the answer was not complete after {self.timeout_s:g} s")
        return b"".join(parts)

    def _refused(self, code: int, text: str) -> UserInputError:
        lowered = text.lower()
        if code in (400, 413, 422) and ("context_length" in lowered or "context length" in lowered):
            return PromptTooLongError(f"{self.url} says that the prompt is too long: {text}")
        return UserInputError(
            f"{self.url} refused the request with status {code}: {text} Check --endpoint, --model, --api-key-env and --body."
        )

    def _clean(self, text: str) -> str:
        key = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        return redacted(text.replace(key, HIDDEN) if key else text)


def _start_of(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read1(2_000).decode("utf-8", "replace") if error.fp is not None else ""
    except (OSError, http.client.HTTPException, ValueError):
        text = ""
    return " ".join(text.split())[:500] or "no message."


def _retry_after(headers: email.message.Message | None) -> float | None:
    """Seconds that the endpoint asks for; a date is not read."""
    text = (headers.get("Retry-After") if headers is not None else None) or ""
    return float(text) if text.isascii() and text.isdigit() else None


def _read_answer(body: bytes) -> ChatAnswer:
    """Read the JSON of an answer.

    Raises:
        ValueError: it is none, or not of the form of a chat completion.
    """
    try:
        value = json.loads(body)
        (choice, *_) = value["choices"]
        text, reason = choice["message"].get("content"), choice.get("finish_reason")
        prompt = (value.get("usage") or {}).get("prompt_tokens")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        start = " ".join(body[:200].decode("utf-8", "replace").split())
        raise ValueError(f"expected a chat completion in JSON, found {start!r}") from error
    if text is not None and not isinstance(text, str):
        raise ValueError(f"expected a text in choices[0].message.content, found {type(text).__name__}")
    counted = prompt if isinstance(prompt, int) else 0
    return ChatAnswer(text or "", "length" if reason == "length" else "stop", counted)
