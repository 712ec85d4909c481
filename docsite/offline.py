"""MkDocs hook: the build fails if the site loads anything from another server.

The theme's script names two addresses that it would load from for features that no page uses; they are taken out.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

_ADDRESS = re.compile(r"""(?:https?:)?//[^\s"'`)<>]+""")
_THEME_DOWNLOADS = re.compile(r"https://unpkg\.com/(?:mermaid@\d+/dist/mermaid\.min\.js|resize-observer-polyfill)")
_STYLE_REFERENCE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^\s"')]+)""", re.IGNORECASE)
# What a script can load from: hosts that serve packages and fonts, and any file of code, style or font.
_SCRIPT_REFERENCE = re.compile(
    r"""https?://(?:[\w.-]*(?:unpkg|jsdelivr|cdnjs|googleapis|gstatic|cdn\.)[^\s"'`)<>]*"""
    r"""|[^\s"'`)<>]+\.(?:m?js|css|woff2?|ttf|otf)\b)"""
)
_COMMENT = re.compile(r"/\*.*?\*/|^\s*//.*?$", re.DOTALL | re.MULTILINE)
# Elements that load what their attribute names; a link (<a href>) loads nothing before it is followed.
_LOADING = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "use": ("href", "xlink:href"),
    "image": ("href", "xlink:href"),
}
_LINKS_THAT_LOAD_NOTHING = {"canonical", "next", "prev", "author", "license"}


class _References(HTMLParser):
    """A parser that collects the remote addresses that a page loads from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._code: re.Pattern[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._code = {"style": _STYLE_REFERENCE, "script": _SCRIPT_REFERENCE}.get(tag)
        self.found += _STYLE_REFERENCE.findall(values.get("style") or "")
        if tag == "link" and values.get("rel") in _LINKS_THAT_LOAD_NOTHING:
            return
        for name in _LOADING.get(tag, ()):
            self.found += _ADDRESS.findall(values.get(name) or "")

    def handle_endtag(self, tag: str) -> None:
        self._code = None

    def handle_data(self, data: str) -> None:
        if self._code:
            self.found += self._code.findall(data)


def remote_references(folder: Path) -> list[str]:
    """Return ``file: address`` of everything that pages, styles and scripts below a folder would load from other servers."""
    found = []
    for file in sorted(folder.rglob("*")):
        if file.suffix not in {".html", ".css", ".js", ".svg"}:
            continue
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".css":
            addresses = _STYLE_REFERENCE.findall(text)
        elif file.suffix == ".js":
            addresses = _SCRIPT_REFERENCE.findall(_COMMENT.sub("", text))
        else:
            parser = _References()
            parser.feed(text)
            addresses = parser.found
        found += [f"{file.relative_to(folder)}: {address}" for address in addresses]
    return found


def on_post_build(config: MkDocsConfig) -> None:
    """Remove the theme's downloads, then check every file.

    Raises:
        PluginError: something would be loaded from elsewhere; names file and address.
    """
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    for source_map in site.glob("assets/**/*.map"):
        source_map.unlink()
    for script in site.glob("assets/javascripts/bundle.*.js"):
        script.write_text(_THEME_DOWNLOADS.sub("", script.read_text(encoding="utf-8")), encoding="utf-8")
    found = remote_references(site)
    if found:
        raise PluginError("The site would load from elsewhere:\n" + "\n".join(found))
