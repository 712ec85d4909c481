"""Protocols of published evaluations: their tasks and settings, by name and environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trial_ray.errors import UserInputError


@dataclass(frozen=True)
class NamedProtocol:
    """Tasks and settings of a published evaluation.

    Attributes:
        source: publication or repository that states the values.
        split: split of the environment.
        tasks: evaluation set, as for :func:`~trial_ray.evaluation.evaluation_sets.choose_evaluation_set`.
        overrides: settings of the config as ``key=value``.
    """

    source: str
    split: str
    tasks: str
    overrides: tuple[str, ...]


def _limits(max_turns: int, max_prompt_tokens: int) -> tuple[str, ...]:
    """Return the settings that all protocols in this module share, with the limits of one environment."""
    return (
        f"env_config.max_turns={max_turns}",
        f"max_prompt_tokens={max_prompt_tokens}",
        "max_response_tokens=512",
        "history_window=2",
        "prompt_style=tagged",
        "evaluation_temperature=0.4",
        "evaluation_top_p=1.0",
    )


_PAPER = "the paper's full-set evaluation; its temperature is that of the released scripts"
_SDAR = "github.com/ZJU-REAL/SDAR at 8b85c23, examples/sdar_trainer, which has the values of verl-agent's scripts"
_ALFWORLD = NamedProtocol(_PAPER, "valid_seen", "full", _limits(50, 2048))
_WEBSHOP = NamedProtocol(_PAPER, "test", "full", _limits(15, 4096))
NAMED_PROTOCOLS = {
    "paper": {"trial/ALFWorld-v0": _ALFWORLD, "trial/WebShop-v0": _WEBSHOP},
    "sdar": {
        "trial/ALFWorld-v0": replace(_ALFWORLD, source=_SDAR, tasks="seen-128"),
        "trial/WebShop-v0": replace(_WEBSHOP, source=_SDAR, tasks="webshop-128"),
    },
}
"""Protocols by name (as in ``--protocol``) and environment id."""


def find_protocol(name: str, env: str | None) -> NamedProtocol:
    """Return a named protocol for an environment.

    Raises:
        UserInputError: there is no protocol of this name, or it is not for this environment.
    """
    if name not in NAMED_PROTOCOLS:
        raise UserInputError(f"There is no protocol {name!r}; expected one of {', '.join(NAMED_PROTOCOLS)}.")
    if env not in NAMED_PROTOCOLS[name]:
        raise UserInputError(f"The protocol {name} is for --env {' or '.join(NAMED_PROTOCOLS[name])}, not for {env}.")
    return NAMED_PROTOCOLS[name][env]
