"""Client of a retrieval server with Search-R1's protocol: requests have a deadline and raise this package's errors."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from trial_envs.errors import RemoteEnvError, ServerAnswerError, ServerConnectionError, ServerTimeoutError
from trial_envs.search_qa.corpus import read_passage
from trial_envs.search_qa.world import Passage

MAX_BYTES = 4_000_000
"""Maximum size of an answer in bytes."""


class RetrievalServer:
    """Client of a retrieval server: sends ``POST /retrieve`` with ``queries``, ``topk`` and ``return_scores``, as Search-R1 does.

    Args:
        url: address of the server, ``http://HOST:PORT``, with or without the path ``/retrieve``.
        timeout_s: seconds for connecting, and then for sending the request and receiving the answer.

    Raises:
        ValueError: ``url`` is not an HTTP address, or ``timeout_s`` is not a positive number.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"The retriever is {url!r}, expected an address such as http://127.0.0.1:8000.")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s is {timeout_s}, expected a positive number of seconds.")
        self._url, self._timeout_s = url, timeout_s
        self._address = parts.netloc
        self._path = parts.path.rstrip("/").removesuffix("/retrieve") + "/retrieve"

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return the server's passages for a query, best first, at most ``top_k``.

        Raises:
            RemoteEnvError: the server answered with an HTTP status other than 200.
            ServerTimeoutError: the server did not answer in time.
            ServerConnectionError: the server cannot be reached, or the connection was lost.
            ServerAnswerError: the answer is too long, or is not a list of passages.
        """
        body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True}).encode()
        status, answer = self._post(body)
        if status != http.client.OK:
            raise RemoteEnvError(f"{self._url} answered with the status {status}: {answer[:300]!r}")
        if len(answer) > MAX_BYTES:
            raise ServerAnswerError(f"{self._url} answered with more than {MAX_BYTES:,} bytes.")
        try:
            (documents,) = json.loads(answer)["result"]
            return [_read_document(document) for document in documents[:top_k]]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ServerAnswerError(
                f"{self._url} answered {answer[:200]!r} ({type(error).__name__}: {error}); expected a JSON object with one list "
                'of documents in "result", each with its text in "contents".'
            ) from error

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the server's answer."""
        connection, expired = http.client.HTTPConnection(self._address, timeout=self._timeout_s), threading.Event()
        try:
            with closing(connection):
                connection.connect()
                # The connection's timeout only limits each single read, so a server that sends byte by byte would not exceed it.
                deadline = threading.Timer(self._timeout_s, _end, (connection.sock, expired))
                deadline.start()
                try:
                    connection.request("POST", self._path, body, {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    answer = response.status, response.read(MAX_BYTES + 1)
                finally:
                    deadline.cancel()
            if expired.is_set():
                raise TimeoutError
            return answer
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise ServerTimeoutError(f"{self._url} did not answer within {self._timeout_s:g} s.") from error
            raise ServerConnectionError(
                f"{self._url}: {type(error).__name__}: {error}; expected a server with Search-R1's protocol there."
            ) from error


def _end(connection: socket.socket, expired: threading.Event) -> None:
    """Set ``expired`` and shut the connection down, which interrupts its reads and writes; called at the deadline."""
    expired.set()
    with suppress(OSError):  # The server may have closed the connection.
        connection.shutdown(socket.SHUT_RDWR)


def _read_document(entry: Any) -> Passage:
    """Return the passage in an entry of the server's answer; an entry with a score has the passage under ``document``."""
    return read_passage(entry.get("document", entry)["contents"])
