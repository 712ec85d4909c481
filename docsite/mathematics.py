"""MkDocs hook: formulas become MathML, which browsers show without a script.

``pymdownx.arithmatex`` (``generic: true``) finds ``$...$`` and ``$$...$$`` and leaves them as ``\\(...\\)`` and ``\\[...\\]``.
"""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# A function's name stands in one <mi> with its argument right behind it, as in "logπ".
_FUNCTION = re.compile(r"(<mi>(?:log|exp|max|min)</mi>)(?!<mo stretchy=\"false\">&#x00028;)")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace every formula of a page by its MathML."""
    return _FORMULA.sub(lambda match: mathml(match[2], match[1] == "div", page.file.src_uri), html)


def mathml(escaped: str, block: bool, page: str) -> str:
    """Return the MathML of a formula.

    Args:
        escaped: LaTeX, with HTML's special characters escaped.
        block: whether it stands on lines of its own.
        page: where it stands, for the error.

    Raises:
        PluginError: the formula is no LaTeX, or uses a command that the converter does not know.
    """
    latex = html.unescape(escaped).strip()
    try:
        converted = convert(latex, display="block" if block else "inline")
    except Exception as error:  # the converter has an exception of its own for every kind of mistake
        raise PluginError(f"{page}: the formula {latex!r} cannot be read: {error!r}") from error
    if "\\" in converted:
        raise PluginError(f"{page}: latex2mathml does not know a command of the formula {latex!r}.")
    return _FUNCTION.sub(r'\1<mspace width="0.17em"/>', converted)
