"""Tables and lists of the documentation, from the code: ``python docsite/reference_tables.py docs/*.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.algorithms.methods import EXAMPLES, METHODS, config_class
from trial_ray.algorithms.rllib_settings import CHECKED_ELSEWHERE, HARMLESS, UNCALLED_HOOKS, UNREAD, VALUES
from trial_ray.config.declare import declaration, default_of, expected, fields_of, sections_of
from trial_ray.metrics import COLUMNS, GROUPS
from trial_ray.sft.training import SFTSettings
from trial_ray.warmstart.settings import WarmStartSettings

_BLOCK = re.compile(r"(<!-- ((?:settings|metrics|hooks) of \S+) -->\n).*?(<!-- end -->)", re.DOTALL)

MAX_NAMES = 4
"""Names of RLlib's unread settings that are written out for each reason; the error about a setting gives its reason too."""


def fill_page(page: str) -> str:
    """Return ``page`` with the text between its markers written from the code.

    Raises:
        KeyError: a marker names no table.
    """
    blocks = _tables()
    return _BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]}\n{found[3]}", page)


def table_names() -> list[str]:
    """Return the names of the tables that the documentation has to show, each once."""
    return list(_tables())


def _tables() -> dict[str, str]:
    tables = {
        f"settings of .{section.name}()": settings_of(GRPOConfig, section.keywords(GRPOConfig))
        for section in sections_of(GRPOConfig)
    }
    tables |= _of_methods()
    tables["settings of sft"] = settings_of(SFTSettings, fields_of(SFTSettings))
    tables["settings of warm-start"] = settings_of(WarmStartSettings, fields_of(WarmStartSettings))
    tables["settings of rllib"] = by_reason(UNREAD, MAX_NAMES)
    expected = {name: words for name, (words, _) in VALUES.items()} | dict.fromkeys(
        sorted(CHECKED_ELSEWHERE), "as RLlib or [the settings](settings.md) say"
    )
    tables["settings of rllib-values"] = by_reason(expected)
    tables["settings of rllib-harmless"] = by_reason(HARMLESS)
    tables |= {f"hooks of {setting}": by_reason(hooks) for setting, hooks in UNCALLED_HOOKS.items()}
    for group in GROUPS:
        if group.name != "evaluation":  # those of rollouts, without a list of their own
            rows = ((_metric_name(group.prefix, metric.name), metric.meaning) for metric in group.metrics)
            tables[f"metrics of {group.name}"] = listed(rows)
    return tables


def _metric_name(prefix: str, name: str) -> str:
    heading, _ = COLUMNS.get(prefix + name, ("", ""))
    return f"`{name}` (*{heading}* in the terminal)" if heading else f"`{name}`"


def by_reason(reasons: Mapping[str, str], max_names: int | None = None) -> str:
    """Return a Markdown list of reasons, each after its names, of which the first ``max_names`` are written out."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names_by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = []
    for reason, names in names_by_reason.items():
        hidden = len(names[max_names:]) if max_names else 0
        rows.append((", ".join(names[:max_names]) + (f" and {hidden} more" if hidden else ""), reason))
    return listed(rows)


def listed(rows: Iterable[tuple[str, str]]) -> str:
    """Return a Markdown list of names and their descriptions."""
    return "".join(f"- {name}: {text}\n" for name, text in rows)


def settings_of(cls: type, names: Iterable[str]) -> str:
    """Return a Markdown list of a class's settings: name with default, type and range, meaning."""
    rows = []
    for name in names:
        field = fields_of(cls)[name]
        text = declaration(field).doc.replace("``", "`")
        rows.append((f"`{name}={default_of(field)!r}`{_kind(field, text)}", text))
    return listed(rows)


def _kind(field: Field[Any], text: str) -> str:
    """Return a setting's type and range in brackets, unless its default and description show them."""
    kind = expected(field).replace("of at least", "≥").replace("above", ">")
    if "`None`" in text or default_of(field) is None:
        kind = kind.removesuffix(", or None")
    choices = declaration(field).bounds.get("one_of", ())
    described = choices and all(str(choice) in text for choice in choices)
    return "" if described or kind == type(default_of(field)).__name__ else f" ({kind})"


def _of_methods() -> dict[str, str]:
    """Return a table of the methods' configs with the defaults that they change, and lists of the settings that they add."""
    rows, tables = ["| config | extends | changed defaults |", "| --- | --- | --- |"], {}
    for method in (*METHODS, *EXAMPLES):
        config, parent = config_class(method), config_class(method).__bases__[0]
        if config is GRPOConfig:
            continue
        inherited = {name: default_of(field) for name, field in fields_of(parent).items()}
        defaults = {name: default_of(field) for name, field in fields_of(config).items()}
        changed = [f"`{name}={defaults[name]!r}`" for name in inherited if inherited[name] != defaults[name]]
        rows.append(f"| `{config.__name__}` | `{parent.__name__}` | {', '.join(changed)} |")
        if added := [name for name in defaults if name not in inherited]:
            tables[f"settings of {method}"] = settings_of(config, added)
    return {"settings of methods": "\n".join(rows) + "\n"} | tables


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(fill_page(file.read_text(encoding="utf-8")), encoding="utf-8")
