"""A Ray cluster's dashboard: what it reports over HTTP of jobs, nodes and actors, and the nodes' log files.

Ray's own client of the log API takes no dashboard's address, and waits without a deadline. `cluster/check_dashboard.py` runs this
file where the package is not installed: it imports the standard library and the package's errors alone.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from trial_ray.errors import ClusterError, InfrastructureError

ANSWER_S = 20
"""How long the dashboard may take for an answer, or for its next part."""
MOST_ROWS = 10_000
"""Most rows of a list; Ray's own limit."""
ALIVE, DEAD = "ALIVE", "DEAD"
"""States of nodes and actors."""


class Dashboard:
    """The dashboard at an address.

    Args:
        address: such as ``http://127.0.0.1:8265``.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    @classmethod
    def find(cls, address: str | None) -> Dashboard:
        """The dashboard at an address, which answers.

        Args:
            address: ``None``: that in the environment, as Ray's own commands take it.

        Raises:
            ClusterError: none is named, none answers there, or it refuses the token.
        """
        given = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS", "")
        if not given.startswith(("http://", "https://")):
            raise ClusterError(
                f"Expected the address of a Ray dashboard, such as http://127.0.0.1:8265; found {given!r}. Give it, or set "
                "RAY_API_SERVER_ADDRESS."
            )
        found = cls(given)
        found.version()
        return found

    def version(self) -> str:
        """Ray's version.

        Raises:
            ClusterError: no dashboard answers there, or it refuses the token.
        """
        answer = self._read("/api/version")
        try:
            return str(json.loads(answer)["ray_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._stranger() from error

    def rows(self, resource: str, **equal: str) -> list[dict[str, Any]]:
        """Rows of Ray's state API.

        Args:
            resource: ``actors``, ``jobs`` or ``nodes``.
            equal: columns, and the value that a row's has to equal.

        Raises:
            ClusterError: as :meth:`version`.
            InfrastructureError: the cluster's state cannot be read.
        """
        query: list[tuple[str, object]] = [("detail", 1), ("limit", MOST_ROWS)]
        for column, value in equal.items():
            query += [("filter_keys", column), ("filter_predicates", "="), ("filter_values", value)]
        rows: list[dict[str, Any]] = self._result(resource, *query)["result"]
        return rows

    def log_files(self, node: str, pattern: str) -> list[str]:
        """Paths of a node's log files, relative to Ray's folder of logs.

        Args:
            node: its id.
            pattern: of these paths, as of ``glob``.

        Raises:
            ClusterError: as :meth:`version`.
            InfrastructureError: the node does not answer.
        """
        found: dict[str, list[str]] = self._result("logs", ("node_id", node), ("glob", pattern), ("timeout", ANSWER_S))
        return sorted(name for names in found.values() for name in names)

    def log(self, node: str, name: str, lines: int) -> bytes:
        """The newest lines of a log file; arguments and errors as of :meth:`log_files`."""
        query = {"node_id": node, "filename": name, "lines": lines, "timeout": ANSWER_S}
        return self._read(f"/api/v0/logs/file?{urlencode(query)}")

    def _result(self, resource: str, *query: tuple[str, object]) -> Any:
        answer = self._read(f"/api/v0/{resource}?{urlencode(query)}")
        try:
            return json.loads(answer)["data"]["result"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._stranger() from error

    def _read(self, path: str) -> bytes:
        try:
            request = urllib.request.Request(self.address + path)
            if token := _token():
                request.add_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (ValueError, HTTPException) as error:
            raise self._stranger() from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ClusterError(
                f"no Ray dashboard answers at {self.address} ({reason}). Is the cluster up, and the port forwarded to this machine "
                "(kubectl port-forward, ray dashboard, ssh -L)?"
            ) from error

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        if error.code == 401:
            return ClusterError(
                f"the cluster at {self.address} asks for a token, and none was sent. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
                "(or RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token)."
            )
        if error.code == 403:
            return ClusterError(
                f"the cluster at {self.address} refuses the token. Its own is shown by `ray get-auth-token` on the head."
            )
        if error.code >= 500:
            return InfrastructureError(f"the cluster at {self.address} cannot answer: {_message(error)}")
        return self._stranger(f" (HTTP status {error.code})")

    def _stranger(self, found: str = "") -> ClusterError:
        return ClusterError(
            f"what answers at {self.address} is no Ray dashboard{found}. Is the port another program's?"
        )


def _message(error: urllib.error.HTTPError) -> str:
    """What the state API says of a failure, in one line."""
    text = error.read().decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["msg"])
    return " ".join(text.split())[:300] or str(error)


def _token() -> str | None:
    """The token that Ray's own client would send."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None
