"""Griffe extension: docstrings as Markdown, and every object in one place.

A cross-reference (``:class:`Name```) becomes a link where the reference documents the name, else code. Names that a package
hands on from its modules are linked in the package's description instead of being described twice.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from griffe import AliasResolutionError, Extension, NameResolutionError

if TYPE_CHECKING:
    from griffe import GriffeLoader, Module, Object

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`(?P<short>~?)(?P<name>[\w.]+)`")
_CODE_BLOCK = re.compile(r"^\.\. code-block:: (?P<language>\w+)\n\n(?P<code>(?:[ ]+.*\n|\n)+)", re.MULTILINE)

# Two colons before an indented block, which Markdown reads as code without them.
_LITERAL_LEAD = re.compile(r"::$(?=\n\n[ ]{4})", re.MULTILINE)


class Roles(Extension):
    """Rewrites the docstrings of a package when all of it is loaded."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Rewrite every docstring of the package."""
        for item in _objects(pkg):
            if item.docstring is not None:
                item.docstring.value = markdown(item.docstring.value, item) + _handed_on(item)
        for item in _objects(pkg):
            if item.is_module:
                item.exports = None


def markdown(docstring: str, item: Object) -> str:
    """Return the docstring of an object as Markdown, without reStructuredText."""

    def role(match: re.Match[str]) -> str:
        name = match["name"]
        shown = name.rpartition(".")[2] if match["short"] else name
        path = _documented_path(item, name)
        return f"[`{shown}`][{path}]" if path else f"`{shown}`"

    def block(match: re.Match[str]) -> str:
        return f"```{match['language']}\n{textwrap.dedent(match['code']).rstrip()}\n```\n\n"

    text = _CODE_BLOCK.sub(block, _ROLE.sub(role, docstring + "\n"))
    return _LITERAL_LEAD.sub(":", text).rstrip()


def _handed_on(item: Object) -> str:
    """Return a sentence with the names of ``__all__`` that are defined in other modules."""
    if not item.is_module or not item.exports:
        return ""
    names = [str(name) for name in item.exports if item.members[str(name)].is_alias]
    paths = {name: _documented_path(item, name) for name in names}
    links = [f"[`{name}`][{path}]" if path else f"`{name}`" for name, path in paths.items()]
    return f"\n\nTo be imported from here: {', '.join(links)}." if links else ""


def _objects(item: Object) -> Any:
    """Iterate over the object and everything that is defined in it, without imported names."""
    yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _documented_path(item: Object, name: str) -> str | None:
    """Return the full path of a name in the object's scope if the reference shows it: public, and with a docstring."""
    first, *rest = name.split(".")
    scopes = [item, item.parent] if item.parent is not None else [item]
    for scope in scopes:
        try:
            path = scope.resolve(first)
            found = item.modules_collection[".".join([path, *rest])]
            found = found.final_target if found.is_alias else found
        except (AliasResolutionError, NameResolutionError, KeyError):
            continue
        hidden = any(part.startswith("_") for part in found.path.split("."))
        return None if hidden or not found.has_docstring else found.path
    return None
