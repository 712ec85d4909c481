"""Tables of the documentation, from the code: ``python -m trial_ray.algorithms.reference_tables docs/*.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.algorithms.methods import EXAMPLES, METHODS, config_class
from trial_ray.algorithms.rllib_settings import UNREAD
from trial_ray.config.declare import default_of, fields_of, sections_of, settings_table
from trial_ray.metrics import GROUPS, metrics_table
from trial_ray.warmstart.settings import WarmStartSettings

_BLOCK = re.compile(r"(<!-- ((?:settings|metrics) of \S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill_page(page: str) -> str:
    """``page`` with what stands between its markers written again from the code.

    Raises:
        KeyError: a marker names no table.
    """
    blocks = _tables()
    return _BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]}\n{found[3]}", page)


def table_names() -> list[str]:
    """Names of the tables that the documentation has to show, each once."""
    return list(_tables())


def _tables() -> dict[str, str]:
    settings = _section_tables() | _method_tables() | {"warm-start": settings_table(WarmStartSettings)}
    settings["rllib"] = _unread_table()
    return {f"settings of {name}": table for name, table in settings.items()} | {
        f"metrics of {group.name}": metrics_table(group) for group in GROUPS
    }


def _unread_table() -> str:
    rows = [f"| `{name}` | {why} |" for name, why in UNREAD.items()]
    return "\n".join(["| setting | what to set, or why there is nothing to set |", "| --- | --- |", *rows]) + "\n"


def _section_tables() -> dict[str, str]:
    return {
        f".{section.name}()": settings_table(
            GRPOConfig, [field.name for field in section.keywords(GRPOConfig).values()]
        )
        for section in sections_of(GRPOConfig)
    }


def _method_tables() -> dict[str, str]:
    """Of each method's config: its base class, the defaults that it changes, and a table of the settings that it adds."""
    tables = {}
    for method in (*METHODS, *EXAMPLES):
        config, parent = config_class(method), config_class(method).__bases__[0]
        if config is GRPOConfig:
            continue
        inherited = {name: default_of(field) for name, field in fields_of(parent).items()}
        defaults = {name: default_of(field) for name, field in fields_of(config).items()}
        added = [name for name in defaults if name not in inherited]
        changed = [
            f"`{name}={default!r}`"
            for name, default in defaults.items()
            if name in inherited and inherited[name] != default
        ]
        text = f"`{config.__name__}` extends `{parent.__name__}`{' with ' if changed else ''}{', '.join(changed)}"
        tables[method] = f"{text}, and adds:\n\n{settings_table(config, added)}" if added else f"{text}.\n"
    return tables


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(fill_page(file.read_text(encoding="utf-8")), encoding="utf-8")
