"""Tables of the documentation, from the code: ``python docsite/reference_tables.py docs/*.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.algorithms.methods import EXAMPLES, METHODS, config_class
from trial_ray.algorithms.rllib_settings import UNREAD
from trial_ray.config.declare import declaration, default_of, expected, fields_of, sections_of
from trial_ray.metrics import GROUPS
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
    tables = {
        f"settings of .{section.name}()": settings_of(GRPOConfig, section.keywords(GRPOConfig))
        for section in sections_of(GRPOConfig)
    }
    tables |= {
        f"settings of {method}": text for method in (*METHODS, *EXAMPLES) if (text := _of_method(config_class(method)))
    }
    tables["settings of warm-start"] = settings_of(WarmStartSettings, fields_of(WarmStartSettings))
    tables["settings of rllib"] = table(
        ("setting", "what to set, or why there is nothing to set"), ((f"`{name}`", why) for name, why in UNREAD.items())
    )
    for group in GROUPS:
        rows = ((f"`{metric.name}`", metric.meaning) for metric in group.metrics)
        tables[f"metrics of {group.name}"] = table(("metric", "definition"), rows)
    return tables


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def settings_of(cls: type, names: Iterable[str]) -> str:
    """Settings of a class, in this order: name with default, type and range, meaning."""
    rows = []
    for name in names:
        field = fields_of(cls)[name]
        kind = expected(field).replace("of at least", "≥").replace("above", ">")
        cells = (f"`{name}={default_of(field)!r}`", kind, declaration(field).doc.replace("``", "`"))
        rows.append(tuple(cell.replace("|", r"\|") for cell in cells))
    return table(("setting", "type", "meaning"), rows)


def _of_method(config: type) -> str:
    """Its base class, the defaults that it changes, and a table of the settings that it adds; empty of GRPO's own config."""
    if config is GRPOConfig:
        return ""
    parent = config.__bases__[0]
    inherited = {name: default_of(field) for name, field in fields_of(parent).items()}
    defaults = {name: default_of(field) for name, field in fields_of(config).items()}
    added = [name for name in defaults if name not in inherited]
    changed = [f"`{name}={defaults[name]!r}`" for name in inherited if inherited[name] != defaults[name]]
    text = f"`{config.__name__}` extends `{parent.__name__}`{' with ' if changed else ''}{', '.join(changed)}"
    return f"{text}, and adds:\n\n{settings_of(config, added)}" if added else f"{text}.\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(fill_page(file.read_text(encoding="utf-8")), encoding="utf-8")
