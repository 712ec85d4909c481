"""Exit with 2 and one line if no Ray dashboard answers at an address, or if it rejects the token.

cluster/submit.sh calls this first, because `ray job submit` takes ten seconds to show a traceback. Only Python is needed.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

ANSWER_S = 20
REFUSED = {
    401: "asks for a token, and none was sent. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH, or "
    "~/.ray/auth_token)",
    403: "refuses the token. Its own is shown by `ray get-auth-token` on the head",
}


def token() -> str:
    """Return the token that Ray's own client would send, or an empty text."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    if variable := os.environ.get("RAY_AUTH_TOKEN"):
        return variable.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def complaint(address: str) -> str:
    """Return what is wrong at a dashboard's address, or an empty text if the dashboard answers."""
    try:
        request = urllib.request.Request(f"{address.rstrip('/')}/api/version")
        if sent := token():
            request.add_header("Authorization", f"Bearer {sent}")
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            json.load(answer)["ray_version"]
    except urllib.error.HTTPError as error:
        if error.code in REFUSED:
            return f"the cluster at {address} {REFUSED[error.code]}."
        return f"the server at {address} is no Ray dashboard (HTTP status {error.code}). Is the port another program's?"
    except (ValueError, KeyError, TypeError, HTTPException):
        return f"the server at {address} is no Ray dashboard. Is the port another program's?"
    except OSError as error:
        return (
            f"no Ray dashboard answers at {address} ({getattr(error, 'reason', error)}). Is the cluster up, and the port forwarded "
            "to this machine (kubectl port-forward, ray dashboard, ssh -L)?"
        )
    return ""


if __name__ == "__main__":
    if problem := complaint(sys.argv[1]):
        print(f"cluster/submit.sh: {problem}", file=sys.stderr)
        sys.exit(2)
