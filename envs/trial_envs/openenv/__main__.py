"""Serve a text environment to clients of OpenEnv.

python -m trial_envs.openenv trial/ALFWorld-v0 --split train --port 8000
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from trial_envs import ENTRY_POINTS, NAMESPACE
from trial_envs.core.extras import install_command
from trial_envs.errors import TrialEnvError


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse ``key=value`` with a value in JSON; a value that is not JSON is kept as text."""
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"expected key=value, such as max_turns=20, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser("python -m trial_envs.openenv", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("env_id", choices=[f"{NAMESPACE}/{name}" for name in ENTRY_POINTS], metavar="ENV_ID")
    parser.add_argument("--split", help="split of the tasks; default: the environment's default")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", type=parse_setting, action="append", default=[], dest="settings",
        help="argument of the environment's constructor, the value in JSON; may be given several times",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: only this machine")
    parser.add_argument("--port", type=int, default=0, help="0: a free port; default: %(default)s")
    parser.add_argument("--max-sessions", type=at_least_one, default=64, help="default: %(default)s")
    parser.add_argument("--idle-timeout", type=seconds, default=600.0, help="seconds; default: %(default)s")
    parser.add_argument("--max-action", type=at_least_one, default=10_000, help="characters; default: %(default)s")
    parser.add_argument(
        "--allow-host", metavar="NAME", action="append", default=[],
        help="name of the server for clients, besides loopback names and its address; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--allow-origin", metavar="URL", action="append", default=[],
        help="site whose pages may use the server, such as https://example.org; may be given several times",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the environment that the command line names, until the process is terminated."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if not 0 <= args.port < 1 << 16:
        parser.error(f"--port is {args.port}, expected 0 to 65535")
    settings = dict(args.settings) | ({} if args.split is None else {"split": args.split})
    try:
        from trial_envs.openenv.server import ServerLimits, serve
    except ImportError as error:
        sys.exit(f"{parser.prog}: OpenEnv's server cannot be imported ({error}): {install_command('openenv')}")
    try:
        names = tuple(args.allow_host), tuple(args.allow_origin)
        limits = ServerLimits(args.max_sessions, args.idle_timeout, args.max_action, *names)
        serve(args.env_id, settings, (args.host, args.port), limits)
    except (TrialEnvError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
