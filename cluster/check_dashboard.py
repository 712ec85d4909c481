"""Exit with 2 and one line where no Ray dashboard answers at an address, or where it refuses the token.

cluster/submit.sh asks first, since `ray job submit` needs ten seconds to show a traceback. Standard library alone: the machine
that submits need not have the package.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

TIMEOUT_S = 20.0


def find_token() -> str | None:
    """The token that Ray's own client would send."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def complaint(address: str) -> str | None:
    """What is wrong with the dashboard at ``address``; ``None`` where it takes jobs of this client."""
    token = find_token()
    request = urllib.request.Request(address.rstrip("/") + "/api/version")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            json.load(answer)["ray_version"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return (
                f"the cluster at {address} asks for a token, and none was sent. Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
                "(or RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token)."
            )
        if error.code == 403:
            return f"the cluster at {address} refuses the token. Its own is shown by `ray get-auth-token` on the head."
        return (
            f"what answers at {address} is no Ray dashboard (HTTP status {error.code}). Is the port another program's?"
        )
    except (ValueError, KeyError, TypeError, HTTPException):
        return f"what answers at {address} is no Ray dashboard. Is the port another program's?"
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            f"no Ray dashboard answers at {address} ({reason}). Is the cluster up, and the port forwarded to this machine "
            "(kubectl port-forward, ray dashboard, ssh -L)?"
        )
    return None


if __name__ == "__main__":
    found = complaint(sys.argv[1])
    if found:
        print(f"cluster/submit.sh: {found}", file=sys.stderr)
        sys.exit(2)
